"""The exact planner against brute force, and what it promises about its plans."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from clusters import cluster_of, random_chip, tiny_model

from ditorch.chips import load_chip
from heteropp.cluster import Cluster
from heteropp.model import Model
from heteropp.plan import Pipeline, Plan, Replica, Stage, validate
from heteropp.planned import rank_memory, rank_times
from heteropp.search.exact import DoesNotFitError, SearchError, search
from heteropp.simulate import simulate


def every_plan(cluster: Cluster, model: Model, global_batch: int):
    """All plans of HeteroAuto's space, written down the slow way."""
    names = cluster.chip_names()
    for dp in range(1, global_batch + 1):
        if global_batch % dp:
            continue
        per_type = []
        for name in names:
            ranks = cluster.ranks_of(name)
            limit = cluster.chip(ranks[0]).tp_limit
            per_type.append(
                [
                    (tp, len(ranks) // (tp * dp), layers, recompute)
                    for tp in (1, 2, 4)
                    if tp <= limit and len(ranks) % (tp * dp) == 0
                    for layers in range(1, model.layers + 1)
                    for recompute in (False, True)
                ]
            )
        for choice in itertools.product(*per_type):
            if sum(pp * layers for _, pp, layers, _ in choice) == model.layers:
                yield plan_of(cluster, model, global_batch, dp, choice)


def plan_of(cluster: Cluster, model: Model, global_batch: int, dp: int, choice) -> Plan:
    stages, first = [], 0
    for name, (tp, pp, layers, recompute) in zip(cluster.chip_names(), choice, strict=True):
        ranks = iter(cluster.ranks_of(name))
        for _ in range(pp):
            replicas = tuple(
                Replica(ranks=tuple(itertools.islice(ranks, tp)), chip=name, batch_share=1)
                for _ in range(dp)
            )
            stages.append(
                Stage(layers=(first, first + layers), recompute=recompute, replicas=replicas)
            )
            first += layers
    pipeline = Pipeline(micro_batches=global_batch // dp, stages=tuple(stages))
    return Plan(
        model=model,
        global_batch=global_batch,
        micro_batch=dp,
        schedule="1f1b",
        zero_stage=1,
        pipelines=(pipeline,),
    )


def formula_s(plan: Plan, cluster: Cluster) -> float:
    """Section 4.3.2, with alpha = 1."""
    pipeline = plan.pipelines[0]
    times = rank_times(plan, cluster)
    stages = [times[stage.replicas[0].ranks[0]] for stage in pipeline.stages]
    comp = [time.forward_s + time.recompute_s + time.backward_s for time in stages]
    return max(
        pipeline.micro_batches * own + time.reduce_s + time.norm_s + time.update_s + sum(comp) - own
        for own, time in zip(comp, stages, strict=True)
    )


def fits(plan: Plan, cluster: Cluster) -> bool:
    return all(
        memory.total <= cluster.chip(rank).memory.capacity_bytes
        for rank, memory in enumerate(rank_memory(plan))
    )


def random_cluster(generator: random.Random) -> Cluster:
    nodes = []
    for index in range(generator.choice([1, 2, 2, 3])):
        chip = random_chip(generator)
        nodes.append((f"chip-{index}", chip, generator.choice([1, 2, 4])))
    return cluster_of(*nodes)


@pytest.mark.parametrize("seed", range(12))
def test_equals_brute_force(seed: int) -> None:
    """Ten random instances a seed, about half of them short of memory."""
    generator = random.Random(seed)
    compared = 0
    while compared < 10:
        cluster = random_cluster(generator)
        model = tiny_model(generator.randint(2, 5))
        batch = generator.choice([2, 4])
        plans = list(every_plan(cluster, model, batch))
        fitting = [formula_s(plan, cluster) for plan in plans if fits(plan, cluster)]
        compared += 1
        if not plans:
            with pytest.raises(SearchError):
                search(cluster, model, batch)
        elif not fitting:
            with pytest.raises(DoesNotFitError):
                search(cluster, model, batch)
        else:
            result = search(cluster, model, batch)
            best = min(c.formula_s for c in (result.best, *result.runners_up))
            assert best == pytest.approx(min(fitting), rel=1e-9)


def test_the_answer_fits_is_valid_and_above_its_bound() -> None:
    generator = random.Random(7)
    answered = 0
    while answered < 15:
        cluster, model = random_cluster(generator), tiny_model(generator.randint(2, 6))
        try:
            result = search(cluster, model, 4)
        except SearchError:
            continue
        answered += 1
        plan = result.best.plan
        validate(plan)
        assert fits(plan, cluster)
        assert plan.prediction is not None
        assert plan.prediction.step_s == simulate(plan, cluster).step_s
        assert plan.prediction.step_s >= plan.prediction.lower_bound_s
        assert plan.prediction.memory_bytes == tuple(m.total for m in rank_memory(plan))


def test_more_memory_comes_first() -> None:
    """Observation #4."""
    small, large = load_chip("d-mini"), load_chip("a-mini")
    cluster = cluster_of(("small", small, 1), ("large", large, 1))
    plan = search(cluster, tiny_model(4), 4).best.plan
    assert [stage.replicas[0].chip for stage in plan.pipelines[0].stages] == ["large", "small"]


def test_recompute_is_chosen_only_where_memory_forces_it() -> None:
    chip = replace(load_chip("a-mini"), tp_limit=1)  # tensor parallelism would save as much
    model = tiny_model(4, sequence_length=64)  # activations weigh more than parameters
    plenty = cluster_of(("x", chip, 2))
    assert not any(s.recompute for s in search(plenty, model, 8).best.plan.pipelines[0].stages)
    best = None
    for capacity in range(100_000, 2_000_000, 20_000):  # the least memory that any plan fits in
        memory = replace(chip.memory, capacity_bytes=capacity)
        try:
            best = search(cluster_of(("x", replace(chip, memory=memory), 2)), model, 8).best.plan
            break
        except DoesNotFitError:
            continue
    assert best is not None
    assert any(stage.recompute for stage in best.pipelines[0].stages)


def test_what_does_not_fit_is_refused_with_stage_need_and_capacity() -> None:
    chip = load_chip("c-mini")
    tight = replace(chip, memory=replace(chip.memory, capacity_bytes=10_000))
    with pytest.raises(DoesNotFitError) as error:
        search(cluster_of(("tight", tight, 2)), tiny_model(4), 4)
    sentence = str(error.value)
    assert "stage " in sentence and "needs " in sentence and "which has 9.8 KiB" in sentence
    assert not fits(error.value.plan, cluster_of(("tight", tight, 2)))
