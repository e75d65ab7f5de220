"""A program that reads an order a line and answers each with a line."""

from __future__ import annotations

import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from dicomm.bench.timing import DEADLINE_S, Failed, Order, Timing


class LineProgram:
    """A contestant: the program says "ready", then answers "P50_US P99_US"."""

    def __init__(self, name: str, command: Sequence[str | Path]) -> None:
        self.name = name
        self._stack = ExitStack()
        self._complaints = self._stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        self._process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            bufsize=0,
        )
        self._pending = b""

    def wait_ready(self) -> None:
        if (line := self._line()) != "ready":
            raise Failed(line)

    def measure(self, order: Order) -> Timing:
        self._tell(order)
        line = self._line()
        try:
            p50_us, p99_us = (float(word) for word in line.split())
        except ValueError:
            raise Failed(line) from None
        return Timing(p50_us, p99_us)

    def _tell(self, order: Order) -> None:
        assert self._process.stdin
        line = f"{order.kind} {order.bytes} {order.window} {order.count}\n"
        try:
            self._process.stdin.write(line.encode())
        except OSError:
            raise Failed(self._last_words()) from None

    def _line(self) -> str:
        """The next line it prints."""
        assert self._process.stdout
        deadline = time.monotonic() + 2 * DEADLINE_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise Failed(f"no answer within {2 * DEADLINE_S:.0f} s")
                piece = os.read(self._process.stdout.fileno(), 65536)
                if not piece:
                    raise Failed(self._last_words())
                self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        return line.decode(errors="replace").strip()

    def _last_words(self) -> str:
        self._process.wait(5)
        self._complaints.seek(0)
        words = self._complaints.read().decode(errors="replace").strip().splitlines()
        return words[0][:300] if words else f"it ended with {self._process.returncode}"

    def close(self) -> None:
        """Closes the program's input, at which it ends; kills it if it has not ended after 10 s."""
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.close()
            self._process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._stack.close()
