"""The named data that a model is tried on: [NAME=]FILE, once for each set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heteropp.api.errors import InputError

EXPECTED = "expected FILE or NAME=FILE, such as wiki=wiki.tokens"


def validation_sets(texts: Sequence[str] | None) -> dict[str, Path]:
    """Returns the file or folder of each set, by name. Raises InputError.

    A set that is given no name has that of its file.
    """
    found: dict[str, Path] = {}
    for text in texts or ():
        name, path = _named(text)
        if name in found:
            raise InputError(
                f"--validation has the name {name} twice, of {found[name]} and {path}; expected "
                "one of each"
            )
        found[name] = path
    return found


def _named(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not equals or "/" in name or (text and Path(text).exists()):  # a file with = in its name
        name, path = Path(text).absolute().name, text
    if not name.strip() or not name.isprintable():
        raise InputError(f"--validation {text} has no name; {EXPECTED}")
    if not path:
        raise InputError(f"--validation {text} has no file; {EXPECTED}")
    return name, Path(path)


def as_texts(given: Any) -> Any:
    """Returns a path, or paths by name, as the command line has them. Raises InputError.

    What is neither is returned as it is.
    """
    if isinstance(given, str | Path):
        return [str(given)]
    if not isinstance(given, Mapping):
        return given
    for name in given:
        if not isinstance(name, str) or not name.strip() or set(name) & set("/="):
            raise InputError(
                f"validation has the name {name!r}; expected a text that is not empty, without / "
                "or ="
            )
    return [f"{name}={path}" for name, path in given.items()]


def absolute(texts: Sequence[str]) -> list[str]:
    """Returns the same sets, for a process in another folder."""
    return [
        str(path) if name == path.name else f"{name}={path}"  # a file's name may have a =
        for name, path in ((n, p.absolute()) for n, p in validation_sets(texts).items())
    ]
