"""The keys of each file that a person writes, made of its JSON schema and the code's comments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCHEMAS = ROOT / "docs" / "schemas"
SOURCES = ("heteropp/description", "heteropp/models", "ditorch/chips", "ditorch/precision")
CLASSES = {  # what a whole file is, where the schema does not say
    "cluster": "ClusterFile",
    "chip": "ChipSpec",
    "plan": "Plan",
    "profile": "Profile",
    "measured": "MeasuredRuns",
    "standards": "Standards",
}
KINDS = {"string": "text", "boolean": "true or false", "object": "a table"}
CLASS = re.compile(r"^class (\w+)")
FIELD = re.compile(r"^    (\w+): .*?  # (.+)$")


def keys(name: str) -> str:
    """Returns the tables of the file's keys in Markdown; name: the schema's."""
    path = SCHEMAS / f"{name}.json"
    schema = json.loads(path.read_text(encoding="utf-8"))
    whole = schema.get("anyOf") or schema.get("oneOf") or [schema]
    lines = [
        "## Its keys\n",
        f"[The JSON schema](../../schemas/{path.name}) of the file says the same; editors complete "
        "and check files by it.\n",
    ]
    for part in whole:
        table = _target(part, schema)
        if len(whole) > 1:
            family = table.get("properties", {}).get("family", {}).get("const")
            lines.append(f"### {f'Of family {family}' if family else _title(_class(part))}\n")
        lines += _table(table, _class(part) or CLASSES.get(name, ""))
    for class_name, part in schema.get("$defs", {}).items():
        if {"$ref": f"#/$defs/{class_name}"} not in whole and "properties" in part:
            lines += [f"### {_title(class_name)}\n", *_table(part, class_name)]
    return "\n".join(lines)


@cache
def _meanings() -> dict[tuple[str, str], str]:
    """What the code says beside the fields of its classes; every class has a name of its own."""
    found, owner = {}, ""
    for path in (path for folder in SOURCES for path in sorted((ROOT / folder).rglob("*.py"))):
        for line in path.read_text(encoding="utf-8").splitlines():
            if heading := CLASS.match(line):
                owner = heading[1]
            elif field := FIELD.match(line):
                found[owner, field[1]] = field[2]
    return found


def _target(part: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in part:
        return schema["$defs"][_class(part)]
    return part


def _table(part: dict[str, Any], class_name: str) -> Iterator[str]:
    if description := part.get("description"):
        yield f"{_one_line(description)}\n"
    yield "| key | what it takes | what it is | if absent |\n|---|---|---|---|"
    required = part.get("required", [])
    for key, value in part.get("properties", {}).items():
        meaning = _one_line(value.get("description") or _meanings().get((class_name, key), ""))
        absent = "it has to be there" if key in required else _default(value)
        yield f"| `{key}` | {_cell(_kind(value))} | {_cell(meaning)} | {absent} |"
    yield ""


def _default(value: dict[str, Any]) -> str:
    default = value.get("default")
    return "" if default in (None, {}, []) else f"`{json.dumps(default)}`"


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
    return " ".join(text.replace("[[", "`[[").replace("]]", "]]`").split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
