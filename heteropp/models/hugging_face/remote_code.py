"""Code in a Hugging Face folder: what it was when it was planned, and whether it may run.

transformers' dynamic modules run it. A process does so only if whoever started it said so, and only
files that are still what the plan says: a plan by itself runs nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from heteropp.models.spec import ModelError

CONFIG, MODEL = "AutoConfig", "AutoModelForCausalLM"  # of auto_map
_REFERENCE = re.compile(r"([A-Za-z_]\w*)\.[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class RemoteCode:
    """The Python files of a folder."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    folder: str  # absolute
    files: tuple[tuple[str, str], ...]  # name and sha256, by name

    @staticmethod
    def of(folder: Path) -> RemoteCode:
        """Returns what a folder has. Raises ModelError."""
        return RemoteCode(
            folder=os.path.abspath(folder),
            files=tuple((name, _sha256(content)) for name, content in _read(folder).items()),
        )

    def at(self, folder: Path) -> RemoteCode:
        """Returns the same files, of another folder."""
        return replace(self, folder=os.path.abspath(folder))

    @property
    def sha256(self) -> str:
        """Returns the hash of all files; where they are makes no difference."""
        return _sha256(repr(self.files).encode())

    def allow(self, trust_remote_code: bool) -> None:
        """Lets this process run it. Raises ModelError where nobody said so, or it has changed."""
        if not trust_remote_code:
            raise ModelError(self._refusal())
        self.contents()
        _allowed.add(self)

    def check_allowed(self) -> None:
        """Raises ModelError where this process may not run it."""
        if self not in _allowed:
            raise ModelError(self._refusal())

    def contents(self, folder: Path | None = None) -> dict[str, bytes]:
        """Returns the files by name, of this folder or of another that has the same.

        Raises ModelError, which names one that is not as it was.
        """
        folder, planned = folder or Path(self.folder), dict(self.files)
        found = _read(folder)
        for name in sorted({*planned, *found}):
            if name not in found:
                raise ModelError(f"{folder / name} is missing, which the model was planned with")
            if name not in planned:
                raise ModelError(f"{folder / name} was not there when the model was planned")
            if _sha256(found[name]) != planned[name]:
                raise ModelError(f"{folder / name} is not what it was when the model was planned")
        return found

    def _refusal(self) -> str:
        return (
            f"the model is code in {self.folder} (auto_map), which is not run without "
            "--trust-remote-code (trust_remote_code=True)"
        )


_allowed: set[RemoteCode] = set()  # in this process


def classes(code: RemoteCode, auto_map: Any) -> tuple[Any, Any]:
    """Returns the classes of the config and of the model that auto_map names. Raises ModelError."""
    return _imported(code, _reference(code, auto_map, CONFIG), _reference(code, auto_map, MODEL))


def _reference(code: RemoteCode, auto_map: Any, kind: str) -> str:
    """Returns what auto_map says of a class, such as "modeling_own.OwnModel"."""
    found = auto_map.get(kind) if isinstance(auto_map, Mapping) else None
    if not isinstance(found, str):
        raise ModelError(f"auto_map has no {kind}, which says where the code's class is")
    if "--" in found:
        raise ModelError(
            f"auto_map has {kind} {found!r}, which is of another repository; expected a class in "
            f"a file of {code.folder}"
        )
    match = _REFERENCE.fullmatch(found)
    if not match or f"{match[1]}.py" not in dict(code.files):
        raise ModelError(
            f"auto_map has {kind} {found!r}; expected FILE.CLASS, of a Python file in {code.folder}"
        )
    return found


@lru_cache(maxsize=8)
def _imported(code: RemoteCode, *references: str) -> tuple[Any, ...]:
    """Imports classes from a copy of the very files that were checked."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    code.check_allowed()
    contents = code.contents()
    try:
        with tempfile.TemporaryDirectory(prefix="heteropp-") as place, _one_at_a_time():
            folder = Path(place, f"code_{code.sha256[:16]}")  # a part of the modules' names
            folder.mkdir()
            for name, content in contents.items():
                (folder / name).write_bytes(content)
            return tuple(
                get_class_from_dynamic_module(each, folder, local_files_only=True)
                for each in references
            )
    except ModelError:
        raise
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        raise ModelError(
            f"the code in {code.folder} cannot be imported: {type(error).__name__}: {text}"
        ) from error


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Keeps ranks apart: transformers copies modules to its cache in place, while others import."""
    from transformers.dynamic_module_utils import HF_MODULES_CACHE

    try:
        os.makedirs(HF_MODULES_CACHE, exist_ok=True)
        lock = open(Path(HF_MODULES_CACHE, ".heteropp.lock"), "a")  # noqa: SIM115
    except OSError as error:
        raise ModelError(
            f"{HF_MODULES_CACHE}, where transformers keeps code that it runs, cannot be written: "
            f"{error.strerror}; HF_MODULES_CACHE names another folder"
        ) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        yield


def _read(folder: Path) -> dict[str, bytes]:
    try:
        return {path.name: path.read_bytes() for path in sorted(folder.glob("*.py"))}
    except OSError as error:
        raise ModelError(f"{error.filename} cannot be read: {error.strerror}") from None


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
