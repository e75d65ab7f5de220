"""A class name is the name of one thing within a package."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TWICE = {"device"}  # torch's own name for what each device module has: torch.<device>.device


def repeated_class_names(package: Path) -> dict[str, list[str]]:
    """The class names that a package defines more than once, each with its files and lines."""
    places: dict[str, list[str]] = defaultdict(list)
    for file in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(), str(file))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{file.relative_to(package)}:{node.lineno}")
    return {name: found for name, found in places.items() if len(found) > 1}


@pytest.mark.parametrize("package", ["heteropp", "ditorch", "dicomm", "hyperhetero"])
def test_no_class_name_is_defined_twice(package: str) -> None:
    found = repeated_class_names(ROOT / package)
    assert {name: places for name, places in found.items() if name not in TWICE} == {}


def test_a_name_that_two_files_define_is_found(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "one.py").write_text("class Piece:\n    pass\n\n\nclass Share:\n    pass\n")
    (tmp_path / "inner" / "two.py").write_text("def f():\n    class Piece:\n        pass\n")
    assert repeated_class_names(tmp_path) == {"Piece": ["inner/two.py:2", "one.py:1"]}
