"""The search of the next plan, in a thread beside whatever the leader does."""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from heteropp.cost.tracing import cache
from heteropp.description.cluster import Cluster
from heteropp.description.plan import Plan
from heteropp.elastic.replanning.replan import Replanned, replan
from heteropp.elastic.replanning.spread import stated_capacity
from heteropp.search.planner import SearchError

T = TypeVar("T")
searching = threading.Lock()  # what planners trace is the whole process's affair
threads: list[threading.Thread] = []
ENDS_S = 10.0  # longer than what is traced at a time


@dataclass(frozen=True)
class Planned:
    """A plan for the chips that there are."""

    cluster: Cluster  # of the chips that the plan uses: mostly all of them
    plan: Plan
    seconds: float  # of the search


def search_beside(
    cluster: Cluster,
    old: Plan,
    old_members: tuple[str, ...],
    nodes: Collection[str],
    documents_apart: bool,
    first: Plan,
) -> Future[Planned]:
    """Begins the search of a plan in a thread, as `replan` does it.

    nodes: a plan that uses these nodes is preferred, if there is one; documents_apart: memory is to
    have room for attention within documents; first: the job's first plan, which may state an
    expert_capacity that `old` does not, where each of its ranks has all experts.
    """
    capacity = stated_capacity(first)

    def search() -> Planned:
        if nodes:
            with suppress(SearchError):
                return planned(replan(cluster, old, old_members, nodes, documents_apart, capacity))
        return planned(replan(cluster, old, old_members, (), documents_apart, capacity))

    def planned(found: Replanned) -> Planned:
        return Planned(found.cluster, found.plan, found.search_s)

    return _beside(search)


def rehearse_beside(cluster: Cluster, plan: Plan, first: Plan) -> None:
    """Searches once and drops the result, to fill the planners' caches before a chip is lost."""
    capacity = stated_capacity(first)
    _beside(lambda: replan(cluster, plan, cluster.members, expert_capacity=capacity))


def _beside(work: Callable[[], T]) -> Future[T]:
    """Begins work in a thread, which the end of the process breaks off.

    One such thread works at a time.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            with searching:
                found = work()
                cache.flush()  # members will read it
                future.set_result(found)
        except BaseException as error:  # whoever asks for the result gets it
            future.set_exception(error)

    threads[:] = [thread for thread in threads if thread.is_alive()]
    threads.append(threading.Thread(target=run, name="planner", daemon=True))
    threads[-1].start()
    return future


@atexit.register
def _break_off() -> None:
    """Ends searches of which nobody will hear: in each, the next line of Python raises.

    Left alone, a daemon thread is killed where it comes back to Python, and if that is from torch's
    C++ code the whole process aborts, though its job is done.
    """
    until_s = time.monotonic() + ENDS_S
    while (left := [t for t in threads if t.is_alive()]) and time.monotonic() < until_s:
        for thread in left:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
            )
        left[0].join(0.1)
