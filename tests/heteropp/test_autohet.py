"""AutoHet's planner: grouping against brute force, partition against all partitions, its plans."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from clusters import cluster_of, random_chip, tiny_model

from heteropp.cost.planned import check_cluster, rank_memory, rank_times
from heteropp.description.chips import load_chip
from heteropp.description.cluster import Cluster
from heteropp.description.plan import Plan, validate
from heteropp.search.autohet import search
from heteropp.search.grouping import UnitType, effective_power, group_devices
from heteropp.search.planner import Request, SearchError


def divisions(left: tuple[int, ...], largest: tuple[int, ...]) -> Iterator[tuple]:
    """Every way to divide counted units into groups."""
    if not any(left):
        yield ()
        return
    for group in itertools.product(*(range(n + 1) for n in left)):
        if any(group) and group <= largest:
            rest = tuple(a - b for a, b in zip(left, group, strict=True))
            for more in divisions(rest, group):
                yield (group, *more)


def brute_force(types: list[UnitType], least_memory: float, micro_batches: int) -> float:
    best = 0.0
    everything = tuple(t.count for t in types)
    for groups in divisions(everything, everything):
        share, rest = divmod(micro_batches, len(groups))
        memory = [
            sum(t.memory_bytes * n for t, n in zip(types, group, strict=True)) for group in groups
        ]
        if rest == 0 and min(memory) >= least_memory:
            weakest = min(effective_power(types, group, share) for group in groups)
            best = max(best, len(groups) * weakest)
    return best


def test_grouping_equals_brute_force() -> None:
    choose = random.Random(20)
    none = 0
    for _ in range(150):
        types = [
            UnitType(choose.randint(1, 4), choose.choice([1, 1.5, 2, 3.3]), choose.choice([16, 80]))
            for _ in range(choose.randint(1, 3))
        ]
        least, micro_batches = choose.choice([0, 30, 90]), choose.choice([1, 2, 4, 6, 12, 16])
        best, found = brute_force(types, least, micro_batches), None
        found = group_devices(types, least, micro_batches)
        if found is None:
            assert best == 0
            none += 1
            continue
        assert found.objective == pytest.approx(best, rel=1e-9)
        held = [sum(column) for column in zip(*found.groups, strict=True)]
        assert held == [t.count for t in types]
    assert 0 < none < 75


def test_grouping_prefers_no_group_that_a_slow_chip_holds_up() -> None:
    """The paper's examples (section V-A), with the powers that it states."""
    one_a100 = [UnitType(1, 2.0, 80.0), UnitType(4, 1.0, 96.0)]
    found = group_devices(one_a100, 107.0, 64)
    assert found is not None
    assert sorted(found.groups) == [(0, 3), (1, 1)]
    pairs = [UnitType(2, 2.0, 160.0), UnitType(1, 4.0, 160.0)]
    found = group_devices(pairs, 107.0, 64)
    assert found is not None
    assert sorted(found.groups) == [(0, 1), (2, 0)]


@pytest.fixture(scope="module")
def planned() -> list[tuple[Cluster, Plan, float]]:
    """Plans for random clusters: unlike chips, memory and links."""
    generator, found = random.Random(7), []
    while len(found) < 25:
        nodes = [
            (f"chip-{index}", random_chip(generator), generator.choice([1, 2, 4]))
            for index in range(generator.choice([1, 2, 3]))
        ]
        cluster, model = cluster_of(*nodes), tiny_model(generator.randint(2, 6))
        request = Request(cluster=cluster, model=model, global_batch=generator.choice([4, 8, 12]))
        try:
            best = search(request).best
        except SearchError:
            continue
        found.append((cluster, best.plan, best.cost_s))
    return found


def stage_s(plan: Plan, cluster: Cluster, pipeline: int) -> list[float]:
    times = rank_times(plan, cluster)
    stages = plan.pipelines[pipeline].stages
    return [times[stage.replicas[0].ranks[0]].micro_batch_s for stage in stages]


def fits(plan: Plan, cluster: Cluster) -> bool:
    return all(
        memory.total <= cluster.chip(rank).memory.capacity_bytes
        for rank, memory in enumerate(rank_memory(plan))
    )


def test_plans_are_valid_and_fit(planned) -> None:
    assert any(len(plan.pipelines) > 1 for _, plan, _ in planned)
    assert any(len(plan.pipelines) == 1 for _, plan, _ in planned)
    for cluster, plan, _ in planned:
        validate(plan)
        check_cluster(plan, cluster)
        assert fits(plan, cluster)
        assert len({stage.tp for p in plan.pipelines for stage in p.stages}) == 1


def test_layers_are_partitioned_as_well_as_can_be(planned) -> None:
    """Equation 4 against every partition of the layers."""
    for cluster, plan, _ in planned:
        for p, pipeline in enumerate(plan.pipelines):
            best = min(
                max(stage_s(other, cluster, p))
                for other in repartitioned(plan, p)
                if fits(other, cluster)
            )
            assert max(stage_s(plan, cluster, p)) == pytest.approx(best, rel=1e-12)
            assert pipeline.stages[0].layers[0] == 0


def repartitioned(plan: Plan, index: int) -> Iterator[Plan]:
    pipeline = plan.pipelines[index]
    count, layers = len(pipeline.stages), plan.model.layers
    for inner in itertools.combinations(range(1, layers), count - 1):
        spans = itertools.pairwise((0, *inner, layers))
        stages = tuple(
            replace(stage, layers=span) for stage, span in zip(pipeline.stages, spans, strict=True)
        )
        pipelines = list(plan.pipelines)
        pipelines[index] = replace(pipeline, stages=stages)
        yield replace(plan, pipelines=tuple(pipelines))


def test_the_cost_is_equation_1(planned) -> None:
    for cluster, plan, cost_s in planned:
        slowest_s = 0.0
        for p, pipeline in enumerate(plan.pipelines):
            times = stage_s(plan, cluster, p)
            step_s = sum(times) + (pipeline.micro_batches - 1) * max(times)
            slowest_s = max(slowest_s, step_s)
        copies = len(plan.pipelines) * plan.pipelines[0].stages[0].dp
        if copies == 1:
            assert cost_s == pytest.approx(slowest_s, rel=1e-12)
        else:
            assert cost_s > slowest_s


def test_weak_chips_come_first(planned) -> None:
    for _, plan, _ in planned:
        for pipeline in plan.pipelines:
            chips = [stage.replicas[0].chip for stage in pipeline.stages]
            assert len(list(itertools.groupby(chips))) == len(set(chips))


def test_what_cannot_be_is_one_sentence() -> None:
    small = load_chip("a-mini")
    small = replace(small, memory=replace(small.memory, capacity_bytes=20_000))
    cluster = cluster_of(("small", small, 2))
    with pytest.raises(SearchError) as error:
        search(Request(cluster=cluster, model=tiny_model(4), global_batch=4))
    assert "\n" not in str(error.value)
    many = cluster_of(("a", load_chip("a-mini"), 7))
    with pytest.raises(SearchError, match=r"at least 7 stages .* has 4 layers"):
        search(Request(cluster=many, model=tiny_model(4), global_batch=1))
    with pytest.raises(SearchError, match="multiple"):
        search(Request(cluster=cluster, model=tiny_model(4), global_batch=5, sequences=2))
