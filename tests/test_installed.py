"""What becomes of tests that lack a package of the system's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LACKING = """
import pytest
from installed import lack, need

@pytest.fixture(scope="module")
def page():
    need("no-browser", "/no/such/browser", "no-such-browser")

@pytest.mark.parametrize("number", range(2))
def test_pages(page, number):
    assert False

def test_alone():
    need("no-header", "/no/such/header.h")

def test_of_rights():
    lack("no disk can be mounted here", "root")

def test_there():
    need("bash", "bash")
    need("dash", "/no/such/program", "/")
"""


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_a_test_without_its_package_is_skipped_and_counted(
    tmp_path: Path, workers: tuple[str, ...]
) -> None:
    code, output = run(tmp_path, *workers)
    assert code == 0 and "1 passed, 4 skipped" in output, output
    lines = output.splitlines()
    assert (
        "2 tests skipped: no-browser is not installed; apt-get install no-browser runs them"
    ) in lines
    assert "1 test skipped: no disk can be mounted here; root runs it" in lines
    assert "1 test skipped: no-header is not installed; apt-get install no-header runs it" in lines


def test_where_everything_must_be_installed_it_fails(tmp_path: Path) -> None:
    code, output = run(tmp_path, HYPERHETERO_TEST_ALL="1")
    assert code == 1 and "2 failed, 1 passed, 2 errors" in output, output
    assert "no-header is not installed; apt-get install no-header runs it" in output


def run(folder: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    (folder / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (folder / "test_lacking.py").write_text(LACKING)
    found = {name: value for name, value in os.environ.items() if name != "HYPERHETERO_TEST_ALL"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, folder],
        env={**found, "PYTHONPATH": str(TESTS / "support"), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr
