"""Docstrings are whole sentences or noun phrases."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("heteropp", "ditorch", "dicomm", "hyperhetero", "tools", "tests")
# a docstring that begins with one of these lacks its subject and its verb
BARE = re.compile(
    "(Of|By|Those|To|From|In|On|At|With|For|As|Into|Onto|Under|Over|Between|Among|Without|Within"
    "|Until|Since|Per|After|Before|During|Through|Against|Besides?|Instead|Like|About)"
    r"(?![-\w])"  # "In-place" is no preposition
)


def bare_docstrings(files: list[Path]) -> Iterator[str]:
    """Yields "file:line: first line" of every docstring that begins with a bare preposition."""
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(), str(file))):
            if not isinstance(
                node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            ):
                continue
            docstring = ast.get_docstring(node) or ""
            if BARE.match(docstring):
                assert isinstance(node.body[0], ast.Expr)
                name = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file.name
                yield f"{name}:{node.body[0].lineno}: {docstring.splitlines()[0]}"


@pytest.mark.parametrize("folder", [".", *FOLDERS])
def test_no_docstring_begins_with_a_bare_preposition(folder: str) -> None:
    pattern = "*.py" if folder == "." else "**/*.py"
    files = sorted((ROOT / folder).glob(pattern))
    assert files
    found = list(bare_docstrings(files))
    assert not found, "\n".join(["docstrings that begin with a bare preposition:", *found])


def test_docstrings_of_modules_classes_and_functions_are_read(tmp_path: Path) -> None:
    file = tmp_path / "riddles.py"
    file.write_text(
        '"""For nothing."""\n'
        'class A:\n    """Of one rank.\n\n    More.\n    """\n'
        '    async def b(self):\n        """In-place sums."""\n'
        '    def c(self):\n        """Those that are up."""\n'
    )
    assert list(bare_docstrings([file])) == [
        "riddles.py:1: For nothing.",
        "riddles.py:3: Of one rank.",
        "riddles.py:10: Those that are up.",
    ]
