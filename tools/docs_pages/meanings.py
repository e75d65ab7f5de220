"""What the sources say of the keys of the files that a person writes.

A field's meaning is the comment beside it, at the end of its line; an argument's is what its
class's docstring says under "Args:". Comments above fields are for the reader of the code.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import textwrap
import tokenize
from functools import cache
from typing import Any

from ditorch.precision.select import Selection

ARGUMENT = re.compile(r"^    (\w+): (.+(?:\n {5,}.+)*)", re.MULTILINE)


def described(class_: type, schema: dict[str, Any], tool: type | None = None) -> dict[str, Any]:
    """Returns the JSON schema of a class with what each of its properties means.

    tool: the precision tool whose arguments the class has.
    """
    meanings = of_fields(class_) if tool is None else of_arguments(tool)
    names = {field.alias: name for name, field in getattr(class_, "model_fields", {}).items()}
    for key, value in schema.get("properties", {}).items():
        if (meaning := meanings.get(names.get(key, key))) is not None:
            value["description"] = meaning
    return schema


def of_fields(class_: type) -> dict[str, str]:
    """Returns the comments beside the fields of a class of ours and its bases."""
    found: dict[str, str] = {}
    for base in reversed(class_.__mro__):
        if base.__module__.partition(".")[0] in ("ditorch", "heteropp"):
            found |= _beside(base)
    return found


def of_arguments(tool: type) -> dict[str, str]:
    """Returns what a precision tool says of its arguments, and else what all tools say of them."""
    section = (inspect.getdoc(tool) or "").partition("Args:\n")[2].partition("\n\n")[0]
    return _beside(Selection) | {name: as_comment(text) for name, text in ARGUMENT.findall(section)}


def as_comment(docstring: str) -> str:
    """Returns a docstring's words as a comment would have them."""
    text = " ".join(docstring.split()).removesuffix(".")
    return text[:1].lower() + text[1:]


@cache
def _beside(class_: type) -> dict[str, str]:
    source = textwrap.dedent(inspect.getsource(class_))
    comments = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and not token.line.lstrip().startswith("#")
    }
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id: comments[field.lineno]
        for field in tree.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if field.lineno in comments
    }
