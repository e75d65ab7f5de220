"""The bound that a process computes beside a search on many chips."""

from __future__ import annotations

import multiprocessing
import resource
import threading
from pathlib import Path

import pytest
from clusters import tiny_model

from ditorch.chips import load_chip
from heteropp.cost.tracing import stage
from heteropp.description.cluster import Cluster, Node, in_order
from heteropp.search.auto.bound import BoundBeside, step_bound_s
from heteropp.search.auto.freedom import Freedom
from heteropp.search.judge import ask
from heteropp.search.planner import OPTIONS, Request


def request_on(nodes: int, vocab: int) -> Request:
    """vocab: its own for each test, so that no other has traced its stages."""
    some = [Node(name, load_chip(name), range(8)) for name in ("b", "c") for _ in range(nodes)]
    return Request(
        cluster=Cluster("many", in_order(some)),
        model=tiny_model(8, vocab=vocab),
        global_batch=2048,
        open=frozenset(OPTIONS),
        budget_s=1.0,
    )


def bound_s(request: Request) -> float:
    return step_bound_s(request, Freedom(request), request.cluster)


def test_a_search_on_many_chips_has_it_and_knows_what_the_process_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    request = request_on(65, vocab=72)
    before_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    result = ask("auto", request, 1).result
    assert result is not None
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime > before_s  # it has worked
    assert multiprocessing.active_children() == []
    monkeypatch.setattr(stage, "record_stage", None)  # nothing is left to be traced
    assert result.lower_bound_s == min(bound_s(request), result.best.cost_s)


@pytest.mark.parametrize("ends", ["killed", "not begun", "of other plans", "asked for"])
def test_it_is_the_same_whoever_computes_it(ends: str) -> None:
    request = request_on(1, vocab=80)
    freedom = Freedom(request)
    with BoundBeside(request) as bound:
        if ends == "not begun":  # beside a thread's work there is no process
            thread = threading.Thread(target=bound.begin, args=(freedom,))
            thread.start()
            thread.join()
        else:
            bound.begin(Freedom(request, cuts_short=True) if ends == "of other plans" else freedom)
        children = multiprocessing.active_children()
        assert len(children) == (ends != "not begun")
        if ends == "killed":
            children[0].kill()
        assert bound.seconds(freedom) == bound_s(request)
    assert multiprocessing.active_children() == []


def test_in_a_daemon_there_is_no_process() -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:  # its workers are daemons
        request = request_on(1, vocab=80)
        assert pool.apply(_bound_within, (request,)) == bound_s(request)


def _bound_within(request: Request) -> float:
    with BoundBeside(request) as bound:
        bound.begin(Freedom(request))
        return bound.seconds(Freedom(request))
