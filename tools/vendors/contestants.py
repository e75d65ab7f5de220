"""Processes that measure in turn: each has a chip of its own, as a process has one vendor's."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

DEADLINE_S = 1200.0  # of one answer: a driver may build for seconds each kernel that a tuner tries


class Failed(Exception):
    """One sentence for the person at the terminal."""


class Contestant:
    """A context manager: what `make` makes, in a process of its own whose environment has `extra`.

    `ask` calls one of its methods. The process starts without a fork, since drivers have threads.
    """

    def __init__(self, name: str, make: Callable[[], Any], extra: dict[str, str]) -> None:
        self._name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(make, theirs, extra), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Contestant:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._pipe.send(None)
        self._process.join(5)
        self._process.kill()
        self._process.join()

    def ask(self, method: str, *arguments: object) -> Any:
        """Returns what the method returns. Raises Failed."""
        with suppress(OSError):  # it has ended; recv says so
            self._pipe.send((method, arguments))
        try:
            if not self._pipe.poll(DEADLINE_S):
                raise Failed(f"{self._name} gave no answer within {DEADLINE_S:.0f} s")
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise Failed(f"the process of {self._name} ended early") from None
        if isinstance(answer, Failed):
            raise Failed(f"{self._name}: {answer}")
        return answer


def _serve(make: Callable[[], Any], pipe: Connection, extra: dict[str, str]) -> None:
    os.environ.update(extra)  # what libraries read as they are loaded
    try:
        made = make()
        while (order := pipe.recv()) is not None:
            method, arguments = order
            pipe.send(getattr(made, method)(*arguments))
    except EOFError:
        pass  # the tool is gone
    except Exception as error:
        first = (str(error).strip().splitlines() or ["no message"])[0]
        pipe.send(Failed(first[:300]))
