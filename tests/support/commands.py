"""Commands run in this process, as a person would start them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import distribution

import pytest

from hyperhetero.cli import CommandLine

# the names of all commands that are installed
COMMANDS = sorted(
    entry.name
    for entry in distribution("hyperhetero").entry_points
    if entry.group == "console_scripts"
)


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it said."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def run_command(app: CommandLine, arguments: Sequence[object]) -> Ended:
    said, warned = io.StringIO(), io.StringIO()
    with redirect_stdout(said), redirect_stderr(warned), pytest.raises(SystemExit) as ended:
        app([str(argument) for argument in arguments])
    return Ended(int(ended.value.code or 0), said.getvalue(), warned.getvalue())
