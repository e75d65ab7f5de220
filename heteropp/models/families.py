"""The families of models, by name: every folder here whose `model.py` has a ModelSpec as `SPEC`."""

from __future__ import annotations

import importlib
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
from pydantic_core import core_schema

from heteropp.models.spec import ModelSpec

if TYPE_CHECKING:
    from pydantic_core import CoreSchema

EARLIER = "llama"  # the only one, of files that say none


@cache
def families() -> dict[str, type[ModelSpec]]:
    """Returns the spec of every family."""
    names = sorted(path.parent.name for path in Path(__file__).parent.glob("*/model.py"))
    return {name: importlib.import_module(f"heteropp.models.{name}.model").SPEC for name in names}


def any_family() -> CoreSchema:
    """Returns a schema of models of any family, which says its name under `family`."""

    def read(value: Any) -> Any:
        if isinstance(value, ModelSpec):
            return value
        if not isinstance(value, dict):
            raise ValueError("expected a model's sizes by name")
        name = value.get("family", EARLIER)
        if name not in families():
            raise ValueError(f"family is {name!r}; expected one of {', '.join(sorted(families()))}")
        # as JSON, so that lists are taken where the dataclass has tuples
        return TypeAdapter(families()[name]).validate_json(json.dumps(value, default=str))

    def write(value: ModelSpec) -> Any:
        return TypeAdapter(type(value)).dump_python(value, mode="json")

    return core_schema.no_info_plain_validator_function(
        read, serialization=core_schema.plain_serializer_function_ser_schema(write)
    )
