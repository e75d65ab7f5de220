"""The bound of a search on many chips, computed by a process beside the search.

The bound is of stages that planners do not trace, which takes a third of a first search's time. On
many chips each plan takes long to simulate, and meanwhile the bound is found.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import warnings
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess

from heteropp.cost.tracing import cache
from heteropp.search.auto.bound.step import step_bound_s
from heteropp.search.auto.freedom import Freedom
from heteropp.search.planner import Request
from hyperhetero.progress import shows_progress


class BoundBeside:
    """The bound on the step of a request's plans. Its process ends with the `with` around it."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._known: dict[Freedom, float] = {}
        self._process: ForkProcess | None = None
        self._freedom: Freedom | None = None  # of the plans whose bound the process computes
        self._answer: Connection | None = None

    def begin(self, freedom: Freedom) -> None:
        """Has a process begin, unless one did before; it knows what was traced until now.

        There is none where the system has no room for one, nor where it might wait for ever: beside
        threads that may hold a lock. And a daemon of multiprocessing may have no process.
        """
        if self._process is not None or not _may_begin():
            return
        context = multiprocessing.get_context("fork")
        # an interrupt is the first process's, which ends the other one
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            answer, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_send, args=(sender, self._request, freedom), daemon=True
            )
            with sender, warnings.catch_warnings():  # of threads, which show progress
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            self._process, self._freedom, self._answer = process, freedom, answer
        except OSError:
            pass  # then seconds() computes it
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def seconds(self, freedom: Freedom) -> float:
        """Returns the bound, as step_bound_s() does: the process's where it is of such plans."""
        if freedom not in self._known:
            found = self._received() if freedom == self._freedom else None
            self._end()
            if found is None:
                found = step_bound_s(self._request, freedom, self._request.cluster)
            self._known[freedom] = found
        return self._known[freedom]

    def _received(self) -> float | None:
        """Returns what the process found; None where it failed, as this one then will."""
        assert self._answer is not None
        try:
            found: float = self._answer.recv()
        except EOFError:
            return None
        cache.read_again(self._request.model)
        return found

    def _end(self) -> None:
        if self._process is not None and self._answer is not None:
            self._process.kill()
            self._process.join()
            self._answer.close()
            self._answer = self._freedom = None

    def __enter__(self) -> BoundBeside:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()


def _may_begin() -> bool:
    others = {*threading.enumerate()} - {threading.current_thread()}
    return all(map(shows_progress, others)) and not multiprocessing.current_process().daemon


def _send(sender: Connection, request: Request, freedom: Freedom) -> None:
    """Sends the bound, and ends the process without what Python does at an end: what threads of
    the first process held when this one began stays locked.
    """
    threading.Thread(target=_end_with_first, daemon=True).start()
    with suppress(BaseException):  # the first process fails in the same way, and says why
        seconds = step_bound_s(request, freedom, request.cluster)
        cache.flush()
        sender.send(seconds)
    os._exit(0)


def _end_with_first() -> None:
    first = multiprocessing.parent_process()
    assert first is not None
    first.join()
    os._exit(1)
