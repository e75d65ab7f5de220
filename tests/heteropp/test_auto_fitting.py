"""Drafts that lack memory compute activations again, as many as they must."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from clusters import cluster_of, tiny_model
from training_run import CHIP, make_plan, moved

from ditorch.chips import ChipSpec, load_chip
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
# whether all is computed again, and whether attention alone
ATTENTION, ALL = (False, True), (True, False)
MODES = (False, False), ATTENTION, ALL


def chip_with(capacity_bytes: int) -> ChipSpec:
    chip = load_chip("a-mini")
    return replace(chip, memory=replace(chip.memory, capacity_bytes=capacity_bytes))


def cluster_with(capacity_bytes: int) -> Cluster:
    return cluster_of((CHIP, chip_with(capacity_bytes), 2))


def trials_with(capacity_bytes: int) -> Trials:
    return trials_on(cluster_with(capacity_bytes), PLAN)


def trials_on(cluster: Cluster, plan: Plan) -> Trials:
    request = Request(
        cluster=cluster,
        model=plan.model,
        global_batch=plan.global_batch,
        open=frozenset(OPTIONS),
    )
    return Trials(request, Freedom(request), Budget(math.inf, None))


def in_mode(mode: tuple[bool, bool]) -> Plan:
    again, attention = mode
    return with_each(
        PLAN, lambda stage: replace(stage, recompute=again, selective_recompute=attention)
    )


def need_bytes(plan: Plan) -> list[int]:
    """What each stage of one chip needs; that does not depend on the other stage's mode."""
    return [memory.total for memory in rank_memory(plan, cluster_with(1 << 30))]


def test_each_stage_computes_as_much_again_as_it_must() -> None:
    needs = {mode: need_bytes(in_mode(mode)) for mode in MODES}
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


def test_what_takes_the_cutoff_is_not_tried_again() -> None:
    capacity_bytes = max(need_bytes(in_mode(ATTENTION)))
    assert capacity_bytes < max(need_bytes(PLAN))
    trials = trials_with(capacity_bytes)
    fitting = try_fitting(Draft(PLAN), trials)
    least_s = simulate(PLAN, trials.cluster).step_s
    assert fitting is not None
    assert fitting.step_s > least_s
    for cutoff_s in (least_s, fitting.step_s):
        assert try_fitting(Draft(PLAN), trials_with(capacity_bytes), cutoff_s) is None
    found = try_fitting(Draft(PLAN), trials_with(capacity_bytes), fitting.step_s * 1.001)
    assert found == fitting


def test_a_slow_draft_is_not_asked_whether_it_fits() -> None:
    trials = trials_with(min(need_bytes(PLAN)) // 2)
    assert try_fitting(Draft(PLAN), trials, simulate(PLAN, trials.cluster).step_s) is None
    assert not trials.lacking
    assert try_fitting(Draft(PLAN), trials) is None
    assert trials.lacking


def test_a_stage_of_any_pipeline_computes_again_and_slack_stays() -> None:
    later = moved(PLAN.pipelines[0], 2)
    small = [
        replace(stage, replicas=tuple(replace(r, chip="small") for r in stage.replicas))
        for stage in later.stages
    ]
    plan = replace(
        PLAN, global_batch=16, pipelines=(*PLAN.pipelines, replace(later, stages=tuple(small)))
    )
    large_bytes, small_bytes = 10 * max(need_bytes(PLAN)), max(need_bytes(in_mode(ATTENTION)))
    chips = (CHIP, chip_with(large_bytes), 2), ("small", chip_with(small_bytes), 2)
    found = try_fitting(Draft(plan, ahead=1), trials_on(cluster_of(*chips), plan))
    assert found is not None
    assert found.draft.ahead == 1
    assert [
        [stage.selective_recompute for stage in pipeline.stages]
        for pipeline in found.plan.pipelines
    ] == [[False, False], [True, False]]


def test_offloaded_activations_are_computed_again_where_the_rest_does_not_fit() -> None:
    interleaved = as_schedule(PLAN, "interleaved-1f1b", 2)
    assert interleaved is not None
    plan = with_each(interleaved, lambda stage: replace(stage, offload=True))
    attention = with_each(plan, lambda stage: replace(stage, selective_recompute=True))
    needs = need_bytes(attention)
    for short, last in ((0, (False, True, True)), (1, (True, False, False))):
        found = try_fitting(Draft(plan), trials_with(max(needs) - short))
        assert found is not None
        assert [
            (stage.recompute, stage.selective_recompute, stage.offload)
            for stage in found.plan.pipelines[0].stages
        ] == [(False, True, True), last]


def test_fused_attention_is_not_computed_again_alone() -> None:
    plan = replace(PLAN, model=replace(MODEL, attention="fused"))
    needs = need_bytes(plan)
    found = try_fitting(Draft(plan), trials_on(cluster_with(max(needs) - 1), plan))
    assert found is not None
    assert [stage.recompute for stage in found.plan.pipelines[0].stages] == [True, False]
    assert not any(stage.selective_recompute for stage in found.plan.pipelines[0].stages)


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


@pytest.fixture
def climbed(monkeypatch: pytest.MonkeyPatch) -> list[Trial]:
    """Where climbs began, each of which ends where the first one did."""
    begun: list[Trial] = []

    def recorded(trial: Trial, trials: Trials, hasty: bool) -> Trial:
        begun.append(trial)
        return begun[0]

    monkeypatch.setattr(restarts, "climb", recorded)
    return begun


def two_starts() -> tuple[Trials, Trial, Trial]:
    """Trials that know of PLAN, which does not fit; a start; and what PLAN fits as."""
    capacity_bytes = max(need_bytes(in_mode(ATTENTION))) - 1
    trials = trials_with(capacity_bytes)
    other = as_schedule(in_mode(ALL), "gpipe", 1)
    assert other is not None
    start = trials.try_(Draft(other))
    # this only simulates it, after which climbs may begin there
    assert trials.try_(Draft(PLAN), simulate(PLAN, trials.cluster).step_s) is None
    fitting = try_fitting(Draft(PLAN), trials_with(capacity_bytes))
    assert start is not None
    assert fitting is not None
    assert any(stage.recompute for stage in fitting.plan.pipelines[0].stages)
    return trials, start, fitting


def test_a_restart_from_a_plan_that_does_not_fit_is_from_one_that_does(
    climbed: list[Trial],
) -> None:
    trials, start, fitting = two_starts()
    restarts.climb_all(trials, [start])
    assert climbed == [start, fitting] * 2  # a hasty and a thorough climb from each


def test_no_restart_is_from_a_plan_that_is_slow_when_it_fits(
    climbed: list[Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    trials, start, fitting = two_starts()
    least_s, close = simulate(PLAN, trials.cluster).step_s, 1.1
    monkeypatch.setattr(restarts, "RESTARTS", [replace(restarts.RESTARTS[0], close=close)])
    assert least_s < fitting.step_s
    trials.best_s = math.nextafter(fitting.step_s / close, 0)
    restarts.climb_all(trials, [start])
    assert climbed == [start] * 2
