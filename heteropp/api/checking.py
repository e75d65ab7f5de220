"""Checks what a program gives to the API's functions, as a command's options are checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from heteropp.api.errors import InputError
from hyperhetero.input import listed


def check_given(options: type, given: Mapping[str, Any]) -> None:
    """Checks values by name against the types and bounds of the fields of a dataclass.

    Raises InputError, one sentence that names all that are wrong.
    """
    text = json.dumps(_as_json(given))
    try:
        # as JSON, where paths are texts, and nothing else is converted
        TypeAdapter(options).validate_json(text, strict=True)
    except ValidationError as error:
        found = {one["loc"]: _wrong(one["loc"], one["msg"], given) for one in error.errors()}
        raise InputError(listed(list(found.values()))) from None


def _wrong(location: tuple[int | str, ...], message: str, given: Mapping[str, Any]) -> str:
    name, *inside = location
    place, value = str(name), given[str(name)]
    if inside:
        place, value = f"{name}[{inside[0]}]", _inside(value, inside[0])
    return f"{place} is {value!r}; expected {message.removeprefix('Input should be ')}"


def _inside(value: Any, key: int | str) -> Any:
    """Returns what stands at a place of a list or a mapping, whose keys JSON has as texts."""
    if isinstance(value, Mapping):
        return next((v for k, v in value.items() if str(k) == str(key)), value)
    return value[int(key)]


def _as_json(value: Any) -> Any:
    """Returns a value as JSON has it; what JSON has no form of becomes what no option takes."""
    if isinstance(value, str | Path):  # a path may have bytes that are no text
        return str(value).encode(errors="surrogatepass").decode(errors="replace")
    if isinstance(value, Mapping):
        return {k if type(k) in (int, str) else repr(k): _as_json(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_as_json(each) for each in value]
    if value is None or type(value) in (bool, int, float):
        return value
    return {"": ""}
