"""Finds a user's definition: a function in a Python file, by "path/of/file.py:function"."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

from heteropp.models.custom.definition import ModelDefinition
from heteropp.models.spec import ModelError


def source_of(function: Callable[[], ModelDefinition]) -> str:
    """Returns where a function stands. Raises ModelError unless a rank could find it there."""
    try:
        file = inspect.getsourcefile(function)
    except TypeError:  # it is built into Python
        file = None
    if file is None or "." in function.__qualname__:
        raise ModelError(
            f"{function.__qualname__} is no function at the top of a Python file, from which every "
            "rank could import it"
        )
    return f"{Path(file).resolve()}:{function.__qualname__}"


def definition_at(source: str) -> ModelDefinition:
    """Imports a file, and returns what its function gives. Raises ModelError."""
    file, _, name = source.rpartition(":")
    return _definition(Path(file).resolve(), name)


@cache
def _definition(file: Path, name: str) -> ModelDefinition:
    function = getattr(_import(file), name, None)
    if not callable(function):
        raise ModelError(f"{file} has no function {name}")
    try:
        found = function()
    except (Exception, SystemExit) as error:
        raise ModelError(f"{name} fails: {type(error).__name__}: {error}") from error
    if not isinstance(found, ModelDefinition):
        raise ModelError(
            f"{name} gives a {type(found).__name__}; expected a heteropp.ModelDefinition"
        )
    return found


@cache
def _import(path: Path) -> ModuleType:
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ModelError(f"{path} is no Python file")
    if name in sys.modules:
        raise ModelError(
            f"{path} plans its own model while it is imported; put what it runs under "
            'if __name__ == "__main__":'
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.append(str(path.parent))  # for what stands beside it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        raise ModelError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module
