"""What a command does when its standard output cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import COMMANDS

HELP = [(name, "--help") for name in COMMANDS]
CHECK = ("heteropp-models", "check", "quickstart")  # its few lines are written when it ends
FULL = "the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("command", [*HELP, CHECK], ids=" ".join)
def test_a_full_disk_is_one_sentence(command: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        for at_once in (False, True):
            assert ended(path_of(command), full.fileno(), at_once) == (1, FULL)


def test_a_file_that_may_not_grow_is_one_sentence(tmp_path: Path) -> None:
    with (tmp_path / "output").open("w") as file:
        for at_once in (False, True):
            command = ("sh", "-c", 'ulimit -f 0; exec "$0" "$@"', *path_of(CHECK))
            code, said = ended(command, file.fileno(), at_once)
            assert (code, said) == (1, "the output cannot be written: File too large\n")


def test_a_command_that_writes_nothing_says_its_own_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        for at_once in (False, True):
            command = path_of(("heteropp-search", "--nonsense"))
            code, said = ended(command, full.fileno(), at_once)
            assert (
                code == 2
                and said.startswith("No such option: --nonsense")
                and said.count("\n") == 1
            )


@pytest.mark.parametrize("command", [HELP[0], CHECK], ids=" ".join)
def test_a_pipe_that_nobody_reads_ends_a_command_without_a_word(command: tuple[str, ...]) -> None:
    for at_once in (False, True):
        with unread_pipe() as pipe:
            assert ended(path_of(command), pipe, at_once) == (1, "")


@contextmanager
def unread_pipe() -> Iterator[int]:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        yield writer
    finally:
        os.close(writer)


def path_of(command: tuple[str, ...]) -> tuple[str, ...]:
    """Returns a command with the path at which it is installed."""
    name, *arguments = command
    return str(Path(sys.executable).with_name(name)), *arguments


def ended(command: tuple[str, ...], output: int, at_once: bool) -> tuple[int, str]:
    """Returns the exit code of a command and what it says on standard error.

    output: the file that is its standard output. at_once: whether Python keeps no output back.
    """
    done = subprocess.run(
        command,
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONUNBUFFERED": "1" if at_once else ""},
    )
    return done.returncode, done.stderr
