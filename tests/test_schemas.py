"""The stored schemas: what the types that read the files say, and what an editor checks by them."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from schemas import FOLDER, schemas

from heteropp.description.cluster import read_cluster
from heteropp.description.files import FileError
from heteropp.description.model import read_model

ROOT = Path(__file__).parent.parent
PRESETS = ROOT / "heteropp" / "description" / "presets"
EARLIER = ROOT / "tests" / "heteropp" / "earlier"
WRITTEN = {
    "cluster": [*(PRESETS / "clusters").glob("*.toml"), *EARLIER.glob("*/cluster.toml")],
    "chip": [*(ROOT / "ditorch" / "chips").glob("*.toml"), *EARLIER.glob("*/neutral.toml")],
    "model": [*(PRESETS / "models").glob("*.toml")],
    "measured": [*(PRESETS / "measured").glob("*.toml")],
    "plan": [*EARLIER.glob("*/plan.json"), *EARLIER.glob("*/*/plan.json")],
    "standards": [ROOT / "ditorch" / "precision" / "standards.toml"],
}


def validator(name):
    schema = json.loads((FOLDER / f"{name}.json").read_text())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def content(path):
    read = tomllib.loads if path.suffix == ".toml" else json.loads
    return read(path.read_text())


def test_the_stored_schemas_are_those_of_the_types():
    stored = {path.stem: path.read_text() for path in FOLDER.glob("*.json")}
    assert stored == schemas(), "run tools/schemas"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_every_key_says_what_it_is(path):
    assert list(keys(json.loads(path.read_text())))
    silent = [
        where
        for where, key in keys(json.loads(path.read_text()))
        if not key.get("description", "").strip()
    ]
    assert not silent, "a comment beside the field, or an entry under Args: of a tool, says it"


def keys(schema, where=""):
    """Yields where each key of a schema is, with its schema."""
    if isinstance(schema, list):
        for part in schema:
            yield from keys(part, where)
    elif isinstance(schema, dict):
        for name, key in schema.get("properties", {}).items():
            yield f"{where}.{name}", key
        for name, part in schema.items():
            yield from keys(part, f"{where}.{name}")


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_there_fits(name):
    assert WRITTEN[name]
    checked = validator(name)
    for path in WRITTEN[name]:
        problems = [problem.message[:200] for problem in checked.iter_errors(content(path))]
        assert not problems, path


@pytest.mark.parametrize("name", WRITTEN)
def test_a_wrong_key_does_not_fit(name):
    checked = validator(name)
    for path in WRITTEN[name]:
        assert not checked.is_valid(content(path) | {"no_such_key": 1}), path


@pytest.mark.parametrize(
    ("name", "read", "preset"),
    [("cluster", read_cluster, "clusters/quickstart"), ("model", read_model, "models/quickstart")],
)
@pytest.mark.parametrize("wrong", ["no_such_key = 1", "name = 5"])
def test_commands_and_schema_refuse_the_same(tmp_path, name, read, preset, wrong):
    text = (PRESETS / f"{preset}.toml").read_text()
    lines = [line for line in text.splitlines() if not line.startswith(wrong.split(" = ")[0])]
    path = tmp_path / "wrong.toml"
    path.write_text("\n".join([wrong, *lines]))
    assert not validator(name).is_valid(content(path))
    with pytest.raises(FileError):
        read(path)


def test_the_configuration_of_the_precision_tools():
    checked = validator("precision")
    assert checked.is_valid({"precision": {"time": {}, "loss": {}}})
    assert not checked.is_valid({"precision": {"no_such_tool": {}}})
    assert not checked.is_valid({"precision": {"time": {"no_such_argument": 1}}})
