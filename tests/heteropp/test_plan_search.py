"""Searches of plans beside an elastic job's leader: rehearsed ones, superseded ones, ended ones."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from clusters import cluster_of, tiny_model
from sampled import sampled
from test_replan import first_plan

from ditorch.chips import load_chip
from heteropp.cost.tracing import cache, stage
from heteropp.cost.tracing.cache import NoLongerWantedError
from heteropp.description.cluster import Cluster
from heteropp.elastic.launcher import plan_search
from heteropp.elastic.launcher.plan_search import Planned, rehearse_beside, search_beside
from heteropp.elastic.replanning.replan import Replanned

WITHIN_S = 100
CLUSTER = cluster_of(("a-mini", load_chip("a-mini"), 2), ("b-mini", load_chip("b-mini"), 1))
MODEL = tiny_model(2, hidden=32, intermediate=64, vocab=48)

ENDS_EARLY = """
import threading
import time
import weakref
import torch
from heteropp.elastic.launcher import plan_search
computing = threading.Event()

class Owner:
    pass

def replan(*_, **__):
    a = torch.ones(300, 300)
    while {computes}:
        a = (a @ a).clamp(0, 1)  # all but always in torch's C++ code
        computing.set()
    until_s = time.monotonic() + 3

    def called_back(_):
        computing.set()
        while time.monotonic() < until_s:
            pass

    while True:  # first in the callback, where Python ignores what is raised
        owner = Owner()
        reference = weakref.ref(owner, called_back)
        del owner

class Some:
    chip_names = staticmethod(list)

plan_search.replan, plan_search.stated_capacity = replan, lambda plan: None
for _ in range({searches}):
    plan_search.rehearse_beside(Some, Some, (), False, Some)
computing.wait()
print("done")
"""


@pytest.mark.parametrize(
    ("searches", "computes"), sampled([(1, True), (3, True), (1, False)], 1, everyday=1)
)
def test_a_process_that_ends_during_a_search_ends_as_it_says(searches: int, computes: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS_EARLY.format(searches=searches, computes=computes)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.fixture(autouse=True)
def traces_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache._path.cache_clear()
    yield
    cache._path.cache_clear()


def without(*ranks: int) -> Cluster:
    return CLUSTER.kept(rank for rank in range(CLUSTER.world_size) if rank not in ranks)


def test_nothing_is_traced_once_a_chip_or_a_node_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Any] = []
    record_stage = stage.record_stage

    def recorded(*args: Any) -> stage.Recording:
        traced.append(args)
        return record_stage(*args)

    monkeypatch.setattr(stage, "record_stage", recorded)
    plan = first_plan(CLUSTER, MODEL, global_batch=8)
    rehearse_beside(CLUSTER, plan, CLUSTER.members, False, plan).result(WITHIN_S)
    assert traced
    traced.clear()
    for lost in [(1,), (2,), (0, 1)]:
        search = search_beside(without(*lost), plan, CLUSTER.members, (), False, plan)
        assert search.result(WITHIN_S).plan.world_size <= CLUSTER.world_size - len(lost)
        assert not traced


def test_a_search_ends_rehearsals_and_the_searches_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All but the last trace for ever; that one ends when all have begun."""
    plan, numbers = first_plan(CLUSTER, MODEL, global_batch=8), itertools.count()
    last, all_began = without(0), threading.Event()

    def traces(cluster: Cluster, *_: object) -> Replanned:
        assert cluster.members != last.members or all_began.wait(WITHIN_S)
        while cluster.members != last.members:
            cache.get(MODEL, f"a test's {next(numbers)}", lambda: 1, int)
        return Replanned(cluster, plan, 1.0, 0.0, "")

    monkeypatch.setattr(plan_search, "replan", traces)

    def search(cluster: Cluster) -> Future[Planned]:
        return search_beside(cluster, plan, CLUSTER.members, (), False, plan)

    dropped = [
        rehearse_beside(CLUSTER, plan, CLUSTER.members, False, plan),
        rehearse_beside(without(2), plan, CLUSTER.members, False, plan),
        search(CLUSTER),
        search(without(2)),
    ]
    found = search(last)
    late = rehearse_beside(without(1), plan, CLUSTER.members, False, plan)  # gives way
    all_began.set()
    assert found.result(WITHIN_S).cluster is last
    for future in [*dropped, late]:
        with pytest.raises(NoLongerWantedError):
            future.result(WITHIN_S)
