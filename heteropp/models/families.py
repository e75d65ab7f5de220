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
    from pydantic import GetJsonSchemaHandler
    from pydantic_core import CoreSchema

EARLIER = "llama"  # the only one, of files that say none


@cache
def families() -> tuple[str, ...]:
    """Returns the names of all families."""
    return tuple(sorted(path.parent.name for path in Path(__file__).parent.glob("*/model.py")))


@cache
def spec_of(family: str) -> type[ModelSpec]:
    """Returns the spec of a family; the others are not imported."""
    spec: type[ModelSpec] = importlib.import_module(f"heteropp.models.{family}.model").SPEC
    return spec


def schema_of_any(handler: GetJsonSchemaHandler) -> dict[str, Any]:
    """Returns the JSON schema of a model of any family; only EARLIER's need not say its name."""
    kinds = []
    for name in families():
        kind = handler(_adapter(spec_of(name)).core_schema)
        if name != EARLIER:
            handler.resolve_ref_schema(kind).setdefault("required", []).append("family")
        kinds.append(kind)
    return {"anyOf": kinds}


@cache
def _adapter(spec: type[ModelSpec]) -> TypeAdapter[ModelSpec]:
    return TypeAdapter(spec)


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
        return _adapter(spec_of(name)).validate_json(json.dumps(value, default=str))

    def write(value: ModelSpec) -> Any:
        return _adapter(type(value)).dump_python(value, mode="json")

    return core_schema.no_info_plain_validator_function(
        read, serialization=core_schema.plain_serializer_function_ser_schema(write)
    )
