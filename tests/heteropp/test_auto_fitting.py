"""Drafts that lack memory compute activations again, as many as they must."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from clusters import cluster_of, tiny_model
from training_run import CHIP, make_plan

from ditorch.chips import load_chip
from heteropp.cost.capacity import fits
from heteropp.cost.planned import rank_memory
from heteropp.description.cluster import Cluster
from heteropp.description.plan import Plan
from heteropp.search.auto import restarts
from heteropp.search.auto.changed import with_each
from heteropp.search.auto.climb import climb
from heteropp.search.auto.fitting import try_fitting
from heteropp.search.auto.freedom import EVERY_SCHEDULE, Freedom, as_schedule
from heteropp.search.auto.trials import Budget, Draft, Trial, Trials
from heteropp.search.planner import OPTIONS, Request
from heteropp.simulator.simulate import simulate

MODEL = tiny_model(6)
# two stages of one chip each, which keep all activations
PLAN = make_plan(MODEL, (3, 3), (1, 1), (1, 1), (False, False), 1, 8)
MODES = KEEP, ATTENTION, ALL = (False, False), (False, True), (True, False)


def cluster_with(capacity_bytes: int) -> Cluster:
    chip = load_chip("a-mini")
    memory = replace(chip.memory, capacity_bytes=capacity_bytes)
    return cluster_of((CHIP, replace(chip, memory=memory), 2))


def trials_with(capacity_bytes: int) -> Trials:
    request = Request(
        cluster=cluster_with(capacity_bytes),
        model=MODEL,
        global_batch=8,
        open=frozenset(OPTIONS),
    )
    return Trials(request, Freedom(request), Budget(math.inf, None))


def in_mode(mode: tuple[bool, bool]) -> Plan:
    again, attention = mode
    return with_each(
        PLAN, lambda stage: replace(stage, recompute=again, selective_recompute=attention)
    )


def need_bytes(mode: tuple[bool, bool]) -> list[int]:
    """What each stage needs in a mode; a chip's memory does not depend on the other stage's."""
    return [memory.total for memory in rank_memory(in_mode(mode), cluster_with(1 << 30))]


def test_each_stage_computes_as_much_again_as_it_must() -> None:
    needs = {mode: need_bytes(mode) for mode in MODES}
    ends = set()
    for capacity_bytes in {n - short for need in needs.values() for n in need for short in (0, 1)}:
        enough = [
            next((mode for mode in MODES if needs[mode][s] <= capacity_bytes), None) for s in (0, 1)
        ]
        found = try_fitting(Draft(PLAN), trials_with(capacity_bytes))
        ends.add(tuple(enough))
        if None in enough:
            assert found is None
            continue
        stages = found.plan.pipelines[0].stages
        assert [(stage.recompute, stage.selective_recompute) for stage in stages] == enough
        assert fits(found.plan, cluster_with(capacity_bytes))
        assert found.step_s == simulate(found.plan, cluster_with(capacity_bytes)).step_s
    assert len(ends) > 3


def test_a_climb_goes_by_way_of_plans_that_fit_only_if_they_compute_more_again() -> None:
    trials = trials_with(300_000)
    slow = make_plan(MODEL, (4, 2), (1, 1), (1, 1), (True, True), 1, 8)
    start = trials.try_(Draft(slow))
    assert start is not None
    fastest_s = min(
        simulate(plan, trials.cluster).step_s
        for plan in plans_of_two_chips()
        if fits(plan, trials.cluster)
    )
    assert climb(start, trials, hasty=False).step_s <= fastest_s < start.step_s / 1.5


def plans_of_two_chips() -> Iterator[Plan]:
    """One stage of two chips or two of one each, with every micro-batch, recompute and schedule."""
    degrees = [((6,), (2,), (1,)), ((6,), (1,), (2,))]
    degrees += [((first, 6 - first), (1, 1), (1, 1)) for first in range(1, 6)]
    for layers, dp, tp in degrees:
        for micro_batch in (1, 2, 4, 8):
            if micro_batch % dp[0] == 0:
                for again in product((False, True), repeat=len(layers)):
                    plan = make_plan(MODEL, layers, dp, tp, again, micro_batch, 8 // micro_batch)
                    for schedule in EVERY_SCHEDULE:
                        for ministages in (2, 3) if schedule == "interleaved-1f1b" else (1,):
                            if other := as_schedule(plan, schedule, ministages):
                                yield other


def test_a_restart_from_a_plan_that_lacks_memory_is_from_one_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    climbed: list[Trial] = []

    def recorded(trial: Trial, trials: Trials, hasty: bool) -> Trial:
        climbed.append(trial)
        return trial

    monkeypatch.setattr(restarts, "climb", recorded)
    trials = trials_with(max(need_bytes(KEEP)) - 1)
    other = as_schedule(in_mode(ALL), "zb-h1", 1)
    assert other is not None
    start = trials.try_(Draft(other))
    assert start is not None
    # this only simulates it, after which climbs may begin there
    assert trials.try_(Draft(PLAN), simulate(PLAN, trials.cluster).step_s) is None
    restarts.climb_all(trials, [start])
    fitting = try_fitting(Draft(PLAN), trials)
    assert fitting is not None
    assert fitting.draft.plan != PLAN
    assert climbed[:2] == [start, fitting]
