"""Tools without touching the script: opened by `import ditorch`, closed as the process ends.

`ditorch.toml` in the working directory (or the file named by DITORCH_CONFIG) has a table for each
tool, with the arguments the tool's class takes:

    [precision.compare]
    operators = "*softmax*, mm"
    steps = "0:10"
    output = "runs/precision"

The environment variable DITORCH_PRECISION does the same, and wins: tool names ("compare,overflow"),
or TOML for the [precision] table ('compare = {steps = "0:10"}').
"""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import sys
import tomllib
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from ditorch.precision.results import findings_path
from ditorch.precision.select import Selection
from ditorch.precision.tool import Tool
from hyperhetero.input import decoded, problems

# Each tool is a module of ditorch.precision and the class in it.
TOOLS = {
    "compare": ("compare", "Compare"),
    "capture": ("capture", "Capture"),
    "fallback": ("fallback", "Fallback"),
    "cast": ("cast", "Cast"),
    "overflow": ("overflow", "FindOverflow"),
    "time": ("timing", "MeasureTime"),
    "observe": ("observe", "Observe"),
    "loss": ("loss", "Losses"),
}


def tool_class(name: str) -> type[Tool]:
    module, class_name = TOOLS[name]
    found: type[Tool] = getattr(import_module(f"ditorch.precision.{module}"), class_name)
    return found


@cache
def open_configured_tools() -> list[Tool]:
    """Opens what the configuration asks for, once, for the rest of the process.

    Raises:
        ValueError: the configuration cannot be used; one sentence naming file and key.
    """
    source, tables = _configuration()
    tools = {name: _make(source, name, arguments) for name, arguments in tables.items()}
    with ExitStack() as opened:
        for name, tool in tools.items():
            try:
                opened.enter_context(tool)
            except OSError as error:
                raise ValueError(f"{source}: {name}: {error}") from None
            opened.callback(_tell, name, tool)  # before the tool is closed
        _at_exit(_close, opened.pop_all())
    return list(tools.values())


def _at_exit(function: Callable[[ExitStack], None], opened: ExitStack) -> None:
    """Children of multiprocessing end without what atexit holds, but run its own finalizers."""
    if multiprocessing.parent_process() is None:
        atexit.register(function, opened)
    else:
        multiprocessing.util.Finalize(None, function, (opened,), exitpriority=0)


def _close(opened: ExitStack) -> None:
    try:
        opened.close()
    except Exception as error:  # nobody is left to catch it; the other tools are closed
        print(f"ditorch: findings were lost: {error}", file=sys.stderr)


def _tell(name: str, tool: Tool) -> None:
    output, findings = getattr(tool, "output", None), tool.findings()
    place = "not written: its output is not set"
    if output is not None:
        place = str(findings_path(output, findings.tool, findings.rank))
    print(f"ditorch: {name}: {findings.summary} ({place})", file=sys.stderr)


def _file() -> Path | None:
    if named := os.environ.get("DITORCH_CONFIG"):
        return Path(named)
    default = Path("ditorch.toml")
    return default if default.is_file() else None


def _configuration() -> tuple[str, dict[str, Any]]:
    if text := os.environ.get("DITORCH_PRECISION"):
        source = "DITORCH_PRECISION"
        if "=" not in text:
            tables: Any = {name.strip(): {} for name in text.split(",") if name.strip()}
        else:
            tables = _parse(source, text)
    elif path := _file():
        source = str(path)
        try:
            document = _parse(source, decoded(path.read_bytes()))
        except OSError as error:
            raise ValueError(f"{source}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ValueError(f"{source}: not UTF-8 text") from None
        if unknown := set(document) - {"precision"}:
            raise ValueError(
                f"{source}: {min(unknown)}: unknown table, expected [precision.<tool>]"
            )
        tables = document.get("precision", {})
    else:
        return "", {}
    if not isinstance(tables, dict):
        raise ValueError(f"{source}: precision: expected a table of tools")
    return source, tables


def _parse(source: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{source}: not TOML: {error}") from None


def _make(source: str, name: str, arguments: Any) -> Tool:
    if name not in TOOLS:
        raise ValueError(f"{source}: {name}: unknown tool, expected one of {', '.join(TOOLS)}")
    if not isinstance(arguments, dict):
        raise ValueError(f"{source}: {name}: expected a table of arguments, got {arguments!r}")
    chosen = tool_class(name)
    try:
        checked = arguments_model(chosen).model_validate(arguments)
        return chosen(**checked.model_dump(exclude_unset=True))
    except ValidationError as error:
        raise ValueError(f"{source}: {problems(error, arguments, name)}") from None
    except ValueError as error:
        raise ValueError(f"{source}: {name}: {error}") from None


def arguments_model(tool: type[Tool]) -> type[BaseModel]:
    """What the tool's constructor takes, as a model that forbids anything else."""
    hints = get_type_hints(tool.__init__)
    fields: dict[str, Any] = {
        name: (hint, None) for name, hint in get_type_hints(Selection).items()
    }
    for name, parameter in signature(tool).parameters.items():
        if parameter.kind is Parameter.KEYWORD_ONLY:
            default = ... if parameter.default is Parameter.empty else parameter.default
            fields[name] = (hints[name], default)
    return create_model(tool.__name__, __config__=ConfigDict(extra="forbid"), **fields)
