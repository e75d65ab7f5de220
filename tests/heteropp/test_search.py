"""The exact planner against brute force, and what it promises about its plans."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from brute_force import (
    BruteForce,
    random_request,
    random_request_of_experts,
    random_request_of_parts,
)
from clusters import cluster_of, tiny_model
from invented import invented_traces_alone
from sampled import sampled

from ditorch.chips import load_chip
from heteropp.cost.capacity import check_memory
from heteropp.cost.planned import rank_memory
from heteropp.description.cluster import Cluster
from heteropp.description.plan import Pipeline, Plan, Stage, validate
from heteropp.schedule.in_flight import in_flight as most_held
from heteropp.schedule.in_flight import whole_in_flight
from heteropp.search.exact import search
from heteropp.search.judge import Verdict, ask
from heteropp.search.planner import DoesNotFitError, Request, SearchError


@pytest.fixture
def invented_traces() -> Iterator[None]:
    with invented_traces_alone():
        yield


def request(cluster: Cluster, layers: int, batch: int, **changes) -> Request:
    return Request(cluster=cluster, model=tiny_model(layers), global_batch=batch, **changes)


@pytest.mark.parametrize("seed", range(8))
def test_equals_brute_force(invented_traces: None, seed: int) -> None:
    """Ten small instances a seed, every option; tools/planner-exactness runs any number."""
    generator = random.Random(f"exact {seed}")
    for _ in range(10):
        against_brute_force(random_request(generator))


@pytest.mark.parametrize("seed", sampled(range(20), 9, everyday=1))
def test_equals_brute_force_where_sequences_may_be_cut(invented_traces: None, seed: int) -> None:
    """Ten such instances a seed, of which some are cut."""
    generator = random.Random(f"exact parts {seed}")
    plans = [against_brute_force(random_request_of_parts(generator)) for _ in range(10)]
    assert seed > 1 or any(plan is not None and plan.has_context_parallelism for plan in plans)


@pytest.mark.parametrize("seed", sampled(range(20), 9, everyday=2))
def test_equals_brute_force_where_experts_may_lie_over_ranks(
    invented_traces: None, seed: int
) -> None:
    """Ten such instances a seed, of which some have experts lie over ranks."""
    generator = random.Random(f"exact experts {seed}")
    plans = [against_brute_force(random_request_of_experts(generator)) for _ in range(10)]
    assert seed > 1 or any(plan is not None and plan.has_expert_parallelism for plan in plans)


def against_brute_force(small: Request) -> Plan | None:
    """Returns the exact planner's plan; None where there is none."""
    brute = BruteForce(small)
    best = brute.best()
    if best is None:
        with pytest.raises(DoesNotFitError if brute.plans else SearchError):
            search(small)
        return None
    result = search(small)
    assert result.best.cost_s == pytest.approx(best, rel=1e-9)
    assert brute.plan_cost_s(result.best.plan) == pytest.approx(best, rel=1e-9)
    assert result.gap == 0
    validate(result.best.plan)
    check_memory(result.best.plan, small.cluster)
    return result.best.plan


def test_runners_up_are_the_best_of_unlike_degrees(invented_traces: None) -> None:
    generator = random.Random("runners-up")
    compared = 0
    while compared < 4:
        small = random_request(generator)
        if small.stage_degrees:
            continue
        brute = BruteForce(small)
        best: dict[tuple, float] = {}
        for replicas, stages in brute.every_plan():
            cost = brute.cost_s(replicas, stages)
            degrees = (replicas, *dict.fromkeys((s.type_index, s.tp) for s in stages))
            if cost is not None:
                best[degrees] = min(cost, best.get(degrees, cost))
        if len(best) < 3:
            continue
        result = search(small)
        found = [result.best.cost_s, *(c.cost_s for c in result.runners_up)]
        assert found == pytest.approx(sorted(best.values())[:4], rel=1e-9)
        compared += 1


def test_more_memory_comes_first() -> None:
    """Observation #4."""
    small, large = load_chip("d-mini"), load_chip("a-mini")
    cluster = cluster_of(("small", small, 1), ("large", large, 1))
    plan = search(request(cluster, 4, 4)).best.plan
    assert [stage.replicas[0].chip for stage in plan.pipelines[0].stages] == ["large", "small"]


def test_recompute_is_chosen_only_where_memory_forces_it() -> None:
    chip = replace(load_chip("a-mini"), tp_limit=1)  # tensor parallelism would save as much
    model = tiny_model(4, sequence_length=64)  # activations weigh more than parameters

    def stages(capacity: int) -> tuple[Stage, ...]:
        memory = replace(chip.memory, capacity_bytes=capacity)
        cluster = cluster_of(("x", replace(chip, memory=memory), 2))
        wanted = Request(cluster=cluster, model=model, global_batch=8)
        return search(wanted).best.plan.pipelines[0].stages

    assert not any(stage.recompute for stage in stages(100_000_000))
    for capacity in range(100_000, 2_000_000, 20_000):  # the least that any plan fits in
        try:
            assert any(stage.recompute for stage in stages(capacity))
            return
        except DoesNotFitError:
            continue
    raise AssertionError


def test_wider_spaces_cost_no_more(invented_traces: None) -> None:
    a, b = load_chip("a-mini"), load_chip("b-mini")
    cluster = cluster_of(("a", a, 4), ("b", b, 2))
    costs = {
        (uneven, degrees): search(
            request(cluster, 6, 8, uneven_layers=uneven, stage_degrees=degrees)
        ).best.cost_s
        for uneven in (False, True)
        for degrees in (False, True)
    }
    assert costs[True, True] <= min(costs[True, False], costs[False, True])
    assert max(costs[True, False], costs[False, True]) <= costs[False, False]
    assert costs[True, True] < costs[False, False]


def test_what_does_not_fit_is_refused_with_stage_need_and_capacity(invented_traces: None) -> None:
    chip = load_chip("c-mini")
    tight = replace(chip, memory=replace(chip.memory, capacity_bytes=10_000))
    cluster = cluster_of(("tight", tight, 2))
    with pytest.raises(DoesNotFitError) as error:
        search(request(cluster, 4, 4))
    sentence = str(error.value)
    assert "stage " in sentence and "needs " in sentence and "which has 9.8 KiB" in sentence
    over = max(memory.total for memory in rank_memory(error.value.plan)) - 10_000
    assert over == pytest.approx(least_overrun(request(cluster, 4, 4)), abs=10_000 / 100)


def least_overrun(wanted: Request) -> int:
    """Finds by brute force the fewest bytes of memory that chips must gain for any plan to fit."""
    brute = BruteForce(wanted)
    low, high = 0, 10_000_000
    while high - low > 1:
        more = (low + high) // 2
        nodes = tuple(
            replace(node, chip=with_more(node.chip, more)) for node in wanted.cluster.nodes
        )
        brute = BruteForce(replace(wanted, cluster=replace(wanted.cluster, nodes=nodes)))
        low, high = (low, more) if brute.best() is not None else (more, high)
    return high


def with_more(chip, more: int):
    return replace(
        chip, memory=replace(chip.memory, capacity_bytes=chip.memory.capacity_bytes + more)
    )


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_what_stages_hold_is_what_the_schedules_say(schedule) -> None:
    stage = Stage(layers=(0, 1), recompute=False, replicas=())
    for stages in range(1, 8):
        for count in (1, 2, 5, 20):
            pipeline = Pipeline(micro_batches=count, stages=(stage,) * stages)
            held = [most_held(schedule, pipeline, s) for s in range(stages)]
            assert held == [
                whole_in_flight(schedule, count, stages, stages - 1 - s) for s in range(stages)
            ]


def test_what_no_degrees_can_use_is_refused() -> None:
    cluster = cluster_of(("a", load_chip("a-mini"), 3), ("b", load_chip("b-mini"), 2))
    with pytest.raises(SearchError, match="3 of chip a, 2 of chip b"):
        search(request(cluster, 3, 8))
    with pytest.raises(SearchError, match="multiple"):
        search(request(cluster, 4, 7, sequences=2))
    with pytest.raises(SearchError, match="zb-v"):
        search(request(cluster, 8, 8, schedule="zb-v"))


def plans_of(result) -> list[Plan]:
    return [candidate.plan for candidate in (result.best, *result.runners_up)]


def test_equal_requests_give_equal_plans(invented_traces: None) -> None:
    generator = random.Random(3)
    compared = 0
    while compared < 5:
        small = random_request(generator)
        try:
            plans = plans_of(search(small))
        except SearchError:
            continue
        assert plans == plans_of(search(small))
        compared += 1


@pytest.mark.parametrize("name", ["exact", "uniform", "heteroauto"])
def test_a_plan_that_is_given_fits_to_the_byte(name: str) -> None:
    """What planners estimate leaves out how shards are rounded, 64 bytes here."""

    def ask_with(capacity_bytes: int) -> tuple[Verdict, Cluster]:
        chip = load_chip("a-mini")
        memory = replace(chip.memory, capacity_bytes=capacity_bytes)
        cluster = cluster_of(("x", replace(chip, memory=memory), 3))
        return ask(name, replace(wanted, cluster=cluster), simulated=1), cluster

    model = tiny_model(6, hidden=48, intermediate=144, sequence_length=32)
    wanted = Request(
        cluster=cluster_of(("x", load_chip("a-mini"), 3)), model=model, global_batch=30
    )
    need = max(memory.total for memory in rank_memory(ask_with(1 << 30)[0].best.plan))
    verdict, cluster = ask_with(need)
    check_memory(verdict.best.plan, cluster)
    verdict, cluster = ask_with(need - 64)
    if verdict.error is None:
        check_memory(verdict.best.plan, cluster)
    else:
        assert isinstance(verdict.error, DoesNotFitError)
