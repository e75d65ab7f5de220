"""Writes docs/schemas: a JSON schema for every file that a person writes, as the commands read it.

Editors complete, explain and check TOML and JSON by them. They come from the types that read the
files, so they say of keys and kinds of values what the commands say; what values mean together only
the commands check. What each key means is what the sources say beside it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docs_pages.meanings import as_comment, described
from pydantic import ConfigDict, Field, TypeAdapter, create_model
from pydantic.json_schema import GenerateJsonSchema

from ditorch.chips import ChipSpec
from ditorch.precision.settings import TOOLS, arguments_model, tool_class
from ditorch.precision.standards import Standards
from heteropp.description.cluster import ClusterFile
from heteropp.description.measured import MeasuredRuns
from heteropp.description.model import ConfiguredModel
from heteropp.description.plan import Plan
from heteropp.description.profile import Profile
from heteropp.models.spec import ModelSpec

MODELS: dict[type, type] = {}  # of a precision tool's arguments, and the tool


class Described(GenerateJsonSchema):
    """Makes schemas as pydantic does, and says in them what every key means."""

    def dataclass_schema(self, schema: Any) -> dict[str, Any]:
        return described(schema["cls"], super().dataclass_schema(schema))

    def model_schema(self, schema: Any) -> dict[str, Any]:
        class_ = schema["cls"]
        return described(class_, super().model_schema(schema), MODELS.get(class_))


def precision_type() -> type:
    """Returns what ditorch.toml holds: a table of arguments for each tool."""
    closed = ConfigDict(extra="forbid")
    fields: Any = {}
    for name in TOOLS:
        tool = tool_class(name)
        model = arguments_model(tool)
        MODELS[model] = tool
        what = as_comment((tool.__doc__ or "").partition("\n\n")[0])
        fields[name] = (model, Field(None, description=what))
    tools = create_model("Tools", __config__=closed, **fields)
    of_tools = Field(None, description="the tools to open, each with a table of its arguments")
    return create_model("Configuration", __config__=closed, precision=(tools, of_tools))


FOLDER = Path(__file__).parent.parent / "docs" / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
FILES = {
    "cluster": (ClusterFile, "A cluster: its machines, their chips, and what links them."),
    "chip": (ChipSpec, "A chip type: vendor, peaks, memory, links, and how it computes."),
    "model": (ModelSpec | ConfiguredModel, "A model: its sizes, or a Hugging Face config.json."),
    "plan": (Plan, "A plan: which ranks hold which layers, and how a step runs over them."),
    "profile": (Profile, "What heteropp-profile measured of chips and links."),
    "measured": (MeasuredRuns, "Measured runs, which heteropp-calibrate fits chips to."),
    "precision": (precision_type(), "The precision tools that a program opens by itself."),
    "standards": (Standards, "Numbers of a team's own in place of the precision standard's."),
}


def schemas() -> dict[str, str]:
    """Returns the text of every schema, by the name of the file that it is for."""
    return {name: _text(name, *of) for name, of in FILES.items()}


def _text(name: str, type_: Any, what: str) -> str:
    schema = TypeAdapter(type_).json_schema(mode="validation", schema_generator=Described)
    if name == "chip":
        del schema["properties"]["path"]  # where the file is, which it does not say
        schema["required"].remove("path")
    if name == "standards":  # any part of it: the rest is the built-in standard's
        for table in (schema, *schema["$defs"].values()):
            table.pop("required", None)
    for key in ("title", "description"):
        schema.pop(key, None)
    return json.dumps({"$schema": DIALECT, "title": what, **schema}, indent=2) + "\n"


def main() -> None:
    """Writes them all; what is there and has no type any more goes."""
    FOLDER.mkdir(exist_ok=True)
    found = schemas()
    for path in FOLDER.glob("*.json"):
        if path.stem not in found:
            path.unlink()
    for name, text in found.items():
        (FOLDER / f"{name}.json").write_text(text)
        print(f"docs/schemas/{name}.json")


if __name__ == "__main__":
    main()
