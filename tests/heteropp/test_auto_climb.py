"""Local search: it ends where no neighbour is faster, and goes no way twice."""

from __future__ import annotations

import math

import pytest
from clusters import cluster_of, tiny_model

from ditorch.chips import load_chip
from heteropp.cost.capacity import fits
from heteropp.description.plan import Pipeline, Plan, PlanError, Replica, Stage, validate
from heteropp.search.auto import climb as climbing
from heteropp.search.auto.climb import LEAST_GAIN, climb
from heteropp.search.auto.freedom import Freedom
from heteropp.search.auto.moves import neighbours
from heteropp.search.auto.trials import Budget, Draft, Trials
from heteropp.search.planner import OPTIONS, Request
from heteropp.simulator.simulate import simulate

LAYERS = 6
CLUSTER = cluster_of(("a-mini", load_chip("a-mini"), 2))
REQUEST = Request(
    cluster=CLUSTER, model=tiny_model(LAYERS), global_batch=8, open=frozenset(OPTIONS)
)


def two_stages(first_layers: int) -> Plan:
    """Two stages of one chip each, which compute all activations again."""
    stages = [
        Stage(
            layers=layers,
            recompute=True,
            replicas=(Replica(ranks=(rank,), chip="a-mini", batch_share=1),),
        )
        for rank, layers in enumerate([(0, first_layers), (first_layers, LAYERS)])
    ]
    return Plan(
        model=REQUEST.model,
        global_batch=8,
        micro_batch=1,
        schedule="1f1b",
        zero_stage=1,
        pipelines=(Pipeline(micro_batches=8, stages=tuple(stages)),),
    )


def new_trials() -> Trials:
    return Trials(REQUEST, Freedom(REQUEST), Budget(math.inf, None))


def test_a_climb_ends_where_no_neighbour_is_faster() -> None:
    trials = new_trials()
    start = trials.try_(Draft(two_stages(1)))
    assert start is not None
    found = climb(start, trials, hasty=False)
    assert found.step_s < start.step_s
    compared = 0
    for draft in (draft for kind in neighbours(found.draft, trials.freedom) for draft in kind):
        try:
            validate(draft.plan)
        except PlanError:
            continue
        if draft.plan.world_size == CLUSTER.world_size and trials.freedom.allows(draft.plan):
            step_s = simulate(draft.plan, CLUSTER).step_s
            if step_s < found.step_s * (1 - LEAST_GAIN):
                assert not fits(draft.plan, CLUSTER)
            compared += 1
    assert compared > 20


def test_a_climb_does_not_go_twice_where_nothing_was_left_out() -> None:
    trials = new_trials()
    starts = [trials.try_(Draft(two_stages(first_layers))) for first_layers in (1, 4)]
    ends = [climb(start, trials, hasty=False) for start in starts if start]
    assert len(ends) == 2
    simulated = trials.simulated
    assert [climb(start, trials, hasty=False) for start in starts if start] == ends
    assert [climb(end, trials, hasty=False) for end in ends] == ends
    assert trials.simulated == simulated


def test_what_a_hasty_climb_has_left_out_a_thorough_one_tries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(climbing, "PATIENCE", 1)
    trials = new_trials()
    start = trials.try_(Draft(two_stages(1)))
    assert start is not None
    trials.best_s = start.step_s / 100  # whatever is found is far behind
    climb(start, trials, hasty=True)
    simulated = trials.simulated
    climb(start, trials, hasty=False)
    assert trials.simulated > simulated
