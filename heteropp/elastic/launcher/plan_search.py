"""The search of the next plan, in a thread beside whatever the leader does.

A first search traces the model, which takes from seconds to minutes. So searches are rehearsed
while the job trains, and what nobody waits for any more ends before its next trace: a rehearsal
when a search begins, a search when the next one does.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from heteropp.cost.tracing import cache
from heteropp.description.cluster import Cluster
from heteropp.description.plan import Plan, PlanError
from heteropp.elastic.replanning.replan import Replanned, replan
from heteropp.elastic.replanning.spread import stated_capacity
from heteropp.search.planner import SearchError

searching = threading.Lock()  # what planners trace is the whole process's affair
ENDS_S = 10.0  # longer than what is traced at a time


@dataclass
class _Work:
    """What a thread does for a future."""

    do: Callable[[], Any]
    is_rehearsal: bool
    future: Future[Any] = field(default_factory=Future)
    is_wanted: bool = True

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name="planner", daemon=True)

    def _run(self) -> None:
        cache.wanted.set(lambda: self.is_wanted)
        try:
            with searching:
                if not self.is_wanted:
                    raise cache.NoLongerWantedError
                found = self.do()
                cache.flush()  # members will read it
                self.future.set_result(found)
        except BaseException as error:  # whoever asks for the result gets it
            self.future.set_exception(error)


works: list[_Work] = []


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

    return _begin(_Work(search, is_rehearsal=False))


def rehearse_beside(
    cluster: Cluster,
    plan: Plan,
    members: tuple[str, ...],
    documents_apart: bool,
    first: Plan,
) -> Future[None]:
    """Searches for the chips that there are, then for those left if one or a node is lost.

    The results are dropped; what was traced is known when a chip is lost. plan, members: those that
    train, by rank.
    """
    capacity = stated_capacity(first)

    def rehearse() -> None:
        for left in (cluster, *_after_a_loss(cluster)):
            if not work.is_wanted:
                raise cache.NoLongerWantedError
            with suppress(PlanError, SearchError):
                replan(left, plan, members, (), documents_apart, capacity)

    work = _Work(rehearse, is_rehearsal=True)
    return _begin(work)


def _after_a_loss(cluster: Cluster) -> Iterator[Cluster]:
    """Yields the cluster without a chip of each type, and without a node of each."""
    for name in cluster.chip_names():
        last = cluster.ranks_of(name)[-1]
        node = next(node.ranks for node in cluster.nodes if last in node.ranks)
        for lost in dict.fromkeys(((last,), tuple(node))):
            if len(lost) < cluster.world_size:
                yield cluster.kept(rank for rank in range(cluster.world_size) if rank not in lost)


def _begin(work: _Work) -> Future[Any]:
    """Begins work in a thread, which the end of the process breaks off.

    One such thread works at a time. A rehearsal gives way to a search that is there already.
    """
    works[:] = [each for each in works if each.thread.is_alive()]
    if work.is_rehearsal:
        work.is_wanted = all(each.is_rehearsal or not each.is_wanted for each in works)
    for each in works:
        each.is_wanted &= work.is_rehearsal and not each.is_rehearsal
    works.append(work)
    work.thread.start()
    return work.future


@atexit.register
def _break_off() -> None:
    """Ends searches of which nobody will hear: in each, the next line of Python raises.

    Left alone, a daemon thread is killed where it comes back to Python, and if that is from torch's
    C++ code the whole process aborts, though its job is done.
    """
    sys.unraisablehook = _report
    until_s = time.monotonic() + ENDS_S
    while (left := _threads()) and time.monotonic() < until_s:
        for thread in left:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
            )
        left[0].join(0.1)


def _report(unraisable: sys.UnraisableHookArgs) -> None:
    """Reports an exception that Python ignores, as one in a weak reference's callback.

    A SystemExit that broke nothing off but a callback is no error: the thread is sent another.
    """
    if unraisable.exc_type is not SystemExit:
        sys.__unraisablehook__(unraisable)


def _threads() -> list[threading.Thread]:
    return [work.thread for work in works if work.thread.is_alive()]
