"""Local search: it ends where no neighbour is faster, and goes no way twice."""

from __future__ import annotations

import math

import pytest
from clusters import cluster_of, tiny_model
from training_run import CHIP, make_plan

from ditorch.chips import load_chip
from heteropp.cost.capacity import fits
from heteropp.description.plan import Plan, PlanError, validate
from heteropp.search.auto import climb as climbing
from heteropp.search.auto.climb import LEAST_GAIN, climb
from heteropp.search.auto.freedom import Freedom
from heteropp.search.auto.moves import Kind, neighbours
from heteropp.search.auto.trials import Budget, Draft, Trial, Trials
from heteropp.search.planner import OPTIONS, Request
from heteropp.simulator.simulate import simulate

LAYERS = 6
CLUSTER = cluster_of((CHIP, load_chip("a-mini"), 2))
REQUEST = Request(
    cluster=CLUSTER, model=tiny_model(LAYERS), global_batch=8, open=frozenset(OPTIONS)
)


def two_stages(first_layers: int) -> Plan:
    """Two stages of one chip each, which compute all activations again."""
    layers = first_layers, LAYERS - first_layers
    return make_plan(REQUEST.model, layers, (1, 1), (1, 1), (True, True), 1, 8)


def new_trials() -> Trials:
    return Trials(REQUEST, Freedom(REQUEST), Budget(math.inf, None))


def tried(plan: Plan, trials: Trials) -> Trial:
    trial = trials.try_(Draft(plan))
    assert trial is not None
    return trial


def test_a_climb_ends_where_no_neighbour_is_faster() -> None:
    trials = new_trials()
    start = tried(two_stages(1), trials)
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


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[Draft]:
    """The drafts whose neighbours climbs have asked for."""
    asked: list[Draft] = []

    def recorded(draft: Draft, freedom: Freedom) -> list[Kind]:
        asked.append(draft)
        return neighbours(draft, freedom)

    monkeypatch.setattr(climbing, "neighbours", recorded)
    return asked


def test_a_climb_does_not_go_twice_where_nothing_was_left_out(rounds: list[Draft]) -> None:
    trials = new_trials()
    start = tried(two_stages(1), trials)
    end = climb(start, trials, hasty=False)
    passed = list(rounds)
    assert passed[0] == start.draft
    assert passed[-1] == end.draft
    rounds.clear()
    for draft in passed:
        assert climb(trials.try_(draft), trials, hasty=False) == end
    assert not rounds


def test_a_climb_that_meets_another_ends_as_that_did(rounds: list[Draft]) -> None:
    trials = new_trials()
    end = climb(tried(two_stages(2), trials), trials, hasty=False)
    passed = set(rounds)
    rounds.clear()
    assert climb(tried(two_stages(1), trials), trials, hasty=False) == end
    assert rounds
    assert not passed & set(rounds)


@pytest.mark.parametrize("behind", [1.07, 100.0])
def test_what_a_hasty_climb_has_left_out_a_thorough_one_tries(
    behind: float, monkeypatch: pytest.MonkeyPatch, rounds: list[Draft]
) -> None:
    """Whether only where it starts is behind the best plan, or all plans of the climb are."""
    monkeypatch.setattr(climbing, "PATIENCE", 1)
    trials = new_trials()
    start = tried(two_stages(1), trials)
    trials.best_s = start.step_s / behind
    climb(start, trials, hasty=True)
    rounds.clear()
    climb(start, trials, hasty=False)
    assert rounds[0] == start.draft


def test_a_climb_that_the_budget_ends_is_gone_again_with_more(rounds: list[Draft]) -> None:
    trials = new_trials()
    start = tried(two_stages(1), trials)
    trials.budget = Budget(1.0, None)
    climb(start, trials, hasty=False)
    assert trials.budget.spent
    trials.budget = Budget(math.inf, None)
    rounds.clear()
    end = climb(start, trials, hasty=False)
    assert rounds
    assert end.step_s < start.step_s


def test_no_neighbour_is_asked_for_when_the_budget_is_spent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trials = new_trials()
    start = tried(two_stages(1), trials)
    late: list[Draft] = []

    def watched(kind: Kind) -> Kind:
        for draft in kind:
            if trials.budget.spent:
                late.append(draft)
            yield draft

    monkeypatch.setattr(
        climbing, "neighbours", lambda *asked: [watched(kind) for kind in neighbours(*asked)]
    )
    trials.budget = Budget(1.0, None)
    climb(start, trials, hasty=False)
    assert trials.budget.spent
    assert len(late) <= 1  # which is made when the budget is asked


def test_a_part_of_a_budget_is_as_much_of_what_is_left() -> None:
    whole = Budget(100.0, None)
    whole.spend(60.0)
    part = whole.part(0.25)
    part.spend(9.0)
    assert not part.spent
    part.spend(1.0)
    assert part.spent
    assert not whole.spent
    assert Budget(0.0, 1000.0).part(0.0).spent
    assert not Budget(0.0, 1000.0).part(0.5).spent
