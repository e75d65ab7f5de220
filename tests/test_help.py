"""Every command's --help comes at once: it imports nothing that takes long."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import COMMANDS

SLOW = {"matplotlib", "numpy", "scipy", "torch", "transformers"}
SUBCOMMANDS = {
    "dicomm": {"topo"},
    "dicomm-bench": {"bandwidth", "collectives", "device", "p2p", "rate"},
    "ditorch-align": {"compare", "conform", "isolate", "replay", "report", "run"},
    "heteropp-models": {"check", "list"},
}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_imports_nothing_slow(name: str) -> None:
    said, imported = run_help(name)
    assert name in said and "--help" in said
    assert not imported & SLOW
    listed = set(re.findall(r"^│ ([a-z0-9]\S*) ", said, re.MULTILINE))
    assert listed >= SUBCOMMANDS.get(name, set()), said


@pytest.mark.parametrize(
    ("name", "subcommand"),
    [(name, sub) for name, subs in SUBCOMMANDS.items() for sub in sorted(subs)],
)
def test_help_of_a_subcommand_imports_nothing_slow(name: str, subcommand: str) -> None:
    said, imported = run_help(name, subcommand)
    assert f"{name} {subcommand}" in said
    assert not imported & SLOW


def test_the_library_imports_nothing_slow_before_it_is_used() -> None:
    _, imported = imports_of("-c", "import heteropp, dicomm, hyperhetero.input, hyperhetero.output")
    assert "heteropp" in imported
    assert not imported & SLOW


def run_help(name: str, *subcommand: str) -> tuple[str, set[str]]:
    """Returns what the installed command says, and the packages that it imports."""
    return imports_of(str(Path(sys.executable).with_name(name)), *subcommand, "--help")


def imports_of(*arguments: str) -> tuple[str, set[str]]:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    names = re.findall(r"^import time:[^|]*\|[^|]*\| *(\S+)$", done.stderr, re.MULTILINE)
    return done.stdout, {name.partition(".")[0] for name in names}
