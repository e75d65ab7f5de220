"""Commands that a step starts, and how they end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from tempfile import TemporaryFile
from typing import IO

# of the surroundings, what chooses a chip or a strategy: each command is given its own
CHOICES = ("DITORCH_VENDOR", "DITORCH_CHIP", "DITORCH_VENDOR_LIBRARY", "DICOMM_STRATEGY")
POLL_S = 0.02


class StepError(Exception):
    """A step failed; the message is one sentence of cause."""


def run(
    module: str,
    *arguments: object,
    environment: Mapping[str, str],
    may_end_with: Sequence[int] = (0,),
) -> str:
    """Runs `python -m module`, and returns what it printed. Raises StepError."""
    with TemporaryFile("w+") as said, TemporaryFile("w+") as warned:
        code = _start(module, arguments, environment, said, warned).wait()
        if code not in may_end_with:
            _pass_on(warned)
            raise StepError(f"{_command(module)} ended with exit code {code}: {last_line(warned)}")
        said.seek(0)
        return said.read()


def run_together(
    module: str, *arguments: object, environments: Sequence[Mapping[str, str]]
) -> None:
    """Runs a command once in each environment, at the same time.

    Raises StepError, with what was said by the first that failed: others fail for want of it.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(TemporaryFile("w+")) for _ in environments]
        running = {
            _start(module, arguments, environment, subprocess.DEVNULL, file): file
            for environment, file in zip(environments, files, strict=True)
        }
        first: str | None = None
        while running:
            for process, file in list(running.items()):
                if process.poll() is not None:
                    del running[process]
                    if process.returncode:
                        _pass_on(file)
                        first = first or f"exit code {process.returncode}: {last_line(file)}"
            time.sleep(POLL_S)
    if first is not None:
        raise StepError(f"one process of {_command(module)} ended with {first}")


def _start(
    module: str,
    arguments: Sequence[object],
    environment: Mapping[str, str],
    output: IO[str] | int,
    errors: IO[str],
) -> subprocess.Popen[bytes]:
    inherited = {name: value for name, value in os.environ.items() if name not in CHOICES}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        env={**inherited, **environment},
    )


def _pass_on(file: IO[str]) -> None:
    """What a command that failed said belongs to what its step says."""
    file.seek(0)
    sys.stderr.write(file.read())


def _command(module: str) -> str:
    """heteropp.cli.train is heteropp-train."""
    return module.replace(".cli.", "-").replace("_", "-")


def last_line(file: IO[str]) -> str:
    """The last line of what was printed to a file, which for a traceback is the exception."""
    file.seek(0)
    lines = [line.strip() for line in file if line.strip()]
    return lines[-1] if lines else "it said nothing"
