"""Checks what a program gives to the API's functions, as a command's options are checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from heteropp.api.errors import InputError


def check_given(options: type, given: Mapping[str, Any]) -> None:
    """Checks values by name against the types and bounds of the fields of a dataclass.

    Raises InputError, one sentence on the first that is wrong.
    """
    text = json.dumps(dict(given), default=_as_json)
    try:
        # as JSON, where paths are texts, and nothing else is converted
        TypeAdapter(options).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"[{part}]" if i else str(part) for i, part in enumerate(first["loc"]))
        value = first["input"] if first["loc"][1:] else given[str(first["loc"][0])]
        expected = first["msg"].removeprefix("Input should be ")
        raise InputError(f"{place} is {value!r}; expected {expected}") from None


def _as_json(value: Any) -> Any:
    """Returns a path as a text, and anything else as what no option takes."""
    return str(value) if isinstance(value, Path) else {"a": type(value).__name__}
