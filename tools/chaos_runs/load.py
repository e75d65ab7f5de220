"""Keeps cores busy beside a run, as other jobs do: what is slow then must still end truly."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# ends by itself where whoever started it was killed
LOOP = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def load(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Runs `count` processes that compute without a pause, at this process's own priority."""
    command = [sys.executable, "-I", "-S", "-c", LOOP, str(os.getpid())]
    busy = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield busy
    finally:
        for process in busy:
            process.kill()
            process.wait()
