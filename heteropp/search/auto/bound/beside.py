"""The bound of a search on many chips, computed by a process beside the search.

A search on few chips asks for bounds all the time. On many chips it needs none before its end, and
the bound is of stages that nothing else has traced: a third of a first search's time.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess

from heteropp.cost.tracing import cache
from heteropp.search.auto.bound.step import step_bound_s
from heteropp.search.auto.freedom import Freedom
from heteropp.search.planner import Request


class BoundBeside:
    """The bound on the step of a request's plans. Its process ends with the `with` around it."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._freedom: Freedom | None = None  # of the bound that the process computes
        self._process: ForkProcess | None = None

    def begin(self, freedom: Freedom) -> None:
        """Has a process begin, unless one did before; it knows what was traced until now.

        There is none where another thread than the main one searches, as the main one may hold any
        lock, and in a daemon of multiprocessing, which may have no process of its own.
        """
        if self._process is not None or not _may_begin():
            return
        context = multiprocessing.get_context("fork")
        self._answer, sender = context.Pipe(duplex=False)
        arguments = (sender, self._request, freedom)
        self._freedom = freedom
        self._process = context.Process(target=_send, args=arguments, daemon=True)
        with warnings.catch_warnings():  # a thread that shows progress holds no lock of a search's
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        sender.close()

    def seconds(self, freedom: Freedom) -> float:
        """Returns the bound, as step_bound_s() does: the process's where it is of such plans."""
        if self._freedom == freedom:
            try:
                seconds: float = self._answer.recv()
            except EOFError:
                pass  # the process failed, as this one will, and say why
            else:
                cache.read_again(self._request.model)
                return seconds
        return step_bound_s(self._request, freedom, self._request.cluster)

    def __enter__(self) -> BoundBeside:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._answer.close()


def _may_begin() -> bool:
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and not multiprocessing.current_process().daemon


def _send(sender: Connection, request: Request, freedom: Freedom) -> None:
    """Sends the bound, and ends the process without what Python does at an end: other threads of
    the first process may have held locks.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends this one
    try:
        seconds = step_bound_s(request, freedom, request.cluster)
        cache.flush()
        sender.send(seconds)
    finally:
        os._exit(0)
