"""The keys of each file that a person writes, made of its JSON schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs_pages.commands import escaped

ROOT = Path(__file__).parents[2]
SCHEMAS = ROOT / "docs" / "schemas"
KINDS = {"string": "text", "boolean": "true or false", "object": "a table"}


def keys(name: str) -> str:
    """Returns the tables of the file's keys in Markdown; name: the schema's."""
    path = SCHEMAS / f"{name}.json"
    schema = json.loads(path.read_text(encoding="utf-8"))
    whole = schema.get("anyOf") or schema.get("oneOf") or [schema]
    lines = [
        "## Its keys\n",
        f"[The JSON schema](../../schemas/{path.name}) of the file says the same; editors "
        "complete, explain and check files by it.\n",
    ]
    for part in whole:
        table = _target(part, schema)
        if len(whole) > 1:
            family = table.get("properties", {}).get("family", {}).get("const")
            lines.append(f"### {f'Of family {family}' if family else _title(_class(part))}\n")
        lines += _table(table)
    for class_name, part in schema.get("$defs", {}).items():
        if {"$ref": f"#/$defs/{class_name}"} not in whole and "properties" in part:
            lines += [f"### {_title(class_name)}\n", *_table(part)]
    return "\n".join(lines)


def _target(part: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in part:
        return schema["$defs"][_class(part)]
    return part


def _table(part: dict[str, Any]) -> Iterator[str]:
    if description := part.get("description"):
        yield f"{_one_line(description)}\n"
    yield "| key | what it takes | what it is | if absent |\n|---|---|---|---|"
    required = part.get("required", [])
    for key, value in part.get("properties", {}).items():
        absent = "required" if key in required else _default(value)
        meaning = _cell(_one_line(value["description"]))
        yield f"| `{key}` | {_cell(_kind(value))} | {meaning} | {absent} |"
    yield ""


def _default(value: dict[str, Any]) -> str:
    default = value.get("default")
    if default in (None, []) or isinstance(default, dict):
        return ""
    return f"`{json.dumps(default)}`"


def _kind(value: dict[str, Any]) -> str:
    """What a value may be, in words."""
    if "$ref" in value:
        name = _title(_class(value))
        return f"[{name}](#{name.lower()})"
    if alternatives := value.get("anyOf") or value.get("oneOf"):
        return _any_of([one for one in alternatives if one.get("type") != "null"])
    if "const" in value:
        return f"`{json.dumps(value['const'])}`"
    if "enum" in value:
        return "one of " + ", ".join(f"`{json.dumps(one)}`" for one in value["enum"])
    kind = value.get("type")
    if kind in ("integer", "number"):
        return f"{'an integer' if kind == 'integer' else 'a number'}{_range(value)}"
    if kind == "array":
        inside = value.get("items") or {}
        many = value.get("prefixItems")
        return f"a list of {_any_of(many) if many else _kind(inside)}"
    if kind == "object" and isinstance(value.get("additionalProperties"), dict):
        return f"a table whose values are {_kind(value['additionalProperties'])}"
    return KINDS.get(str(kind), "anything")


def _any_of(alternatives: list[dict[str, Any]]) -> str:
    return ", or ".join(dict.fromkeys(_kind(one) for one in alternatives))


def _range(value: dict[str, Any]) -> str:
    bounds = {"minimum": "at least", "exclusiveMinimum": "above"}
    bounds |= {"maximum": "at most", "exclusiveMaximum": "below"}
    words = [f"{word} {value[key]:,}" for key, word in bounds.items() if key in value]
    return f" {' and '.join(words)}" if words else ""


def _class(value: dict[str, Any]) -> str:
    return value.get("$ref", "").rpartition("/")[2]


def _title(name: str) -> str:
    """A class's name as a heading and an anchor of its own."""
    return name.strip("_")


def _one_line(text: str) -> str:
    """The text as one line of Markdown, whose code alone is marked."""
    spans = " ".join(text.replace("[[", "`[[").replace("]]", "]]`").split()).split("`")
    return "`".join(span if i % 2 else escaped(span) for i, span in enumerate(spans))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
