"""Replicas go elsewhere: one moves to another stage, or two exchange their ranks."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
from clusters import cluster_of, tiny_model

from ditorch.chips import load_chip
from heteropp.description.cluster import Cluster
from heteropp.description.plan import Pipeline, Plan, Replica, Stage, validate
from heteropp.search.auto.freedom import Freedom
from heteropp.search.auto.moves import neighbours
from heteropp.search.auto.replica_moves import exchanged
from heteropp.search.auto.trials import Draft, ranks_of
from heteropp.search.planner import OPTIONS, Request

SHARES = (3, 1)


def nodes_of(*chips: str) -> Cluster:
    """A cluster of nodes of four chips each."""
    return cluster_of(*((chip, load_chip(chip), 4) for chip in chips))


def plan_of(cluster: Cluster, *stages: tuple[tuple[int, ...], ...]) -> Plan:
    """A plan of stages of one layer each. stages: the ranks of each of its one or two replicas."""
    return Plan(
        model=tiny_model(len(stages)),
        global_batch=8,
        micro_batch=4,
        schedule="1f1b",
        zero_stage=1,
        pipelines=(
            Pipeline(
                micro_batches=2,
                stages=tuple(
                    Stage(
                        layers=(s, s + 1),
                        recompute=False,
                        replicas=tuple(
                            Replica(
                                ranks=ranks,
                                chip=cluster.node(ranks[0]).chip_name,
                                batch_share=share if len(replicas) > 1 else 4,
                            )
                            for ranks, share in zip(replicas, SHARES, strict=False)
                        ),
                    )
                    for s, replicas in enumerate(stages)
                ),
            ),
        ),
    )


def ranks_by_stage(plan: Plan) -> list[tuple[tuple[int, ...], ...]]:
    return [tuple(r.ranks for r in stage.replicas) for stage in plan.pipelines[0].stages]


def nodes_by_stage(plan: Plan, cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """The nodes of each stage's replicas, of one rank each."""
    return tuple(
        tuple(sorted(cluster.node_index(rank) for r in stage.replicas for rank in r.ranks))
        for stage in plan.pipelines[0].stages
    )


def neighbouring(plan: Plan, cluster: Cluster) -> list[Plan]:
    request = Request(cluster=cluster, model=plan.model, global_batch=8, open=frozenset(OPTIONS))
    return [draft.plan for kind in neighbours(Draft(plan), Freedom(request)) for draft in kind]


def test_stages_on_a_node_each_share_both() -> None:
    cluster = nodes_of("a-mini", "a-mini")
    plan = plan_of(cluster, ((0,), (1,)), ((4,), (5,)))
    (exchange,) = exchanged(plan, cluster)
    assert ranks_by_stage(exchange) == [((4,), (1,)), ((0,), (5,))]
    assert exchange in neighbouring(plan, cluster)


def test_replicas_of_one_stage_exchange_nodes() -> None:
    """So that the first of two pipelines begins where the second one ends, and the other way."""
    cluster = nodes_of("a-mini", "a-mini")
    plan = plan_of(cluster, ((0,), (4,)), ((1,), (5,)))
    ways = [ranks_by_stage(exchange) for exchange in exchanged(plan, cluster)]
    assert [((4,), (0,)), ((1,), (5,))] in ways
    assert [((0,), (4,)), ((5,), (1,))] in ways
    assert all(exchange in neighbouring(plan, cluster) for exchange in exchanged(plan, cluster))
    alone = plan_of(cluster, ((0,), (4,)))
    assert not list(exchanged(alone, cluster))  # nothing lies beside the stage


def test_a_replica_moves_to_another_stage() -> None:
    cluster = nodes_of("a-mini", "c-mini")
    plan = plan_of(cluster, ((0,), (1,)), ((4,),))
    others = neighbouring(plan, cluster)
    found = [other for other in others if ranks_by_stage(other) == [((1,),), ((4,), (0,))]]
    assert {tuple(r.batch_share for r in p.pipelines[0].stages[1].replicas) for p in found} >= {
        (2, 2),
        (3, 1),
    }


def test_stages_of_two_pipelines_exchange_replicas_of_two_nodes() -> None:
    cluster = nodes_of("a-mini", "a-mini", "a-mini")
    plan = plan_of(cluster, ((0, 4), (1, 5)))
    other = plan_of(cluster, ((2, 8), (3, 9))).pipelines[0]
    both = replace(plan, global_batch=16, pipelines=(*plan.pipelines, other))
    (exchange,) = exchanged(both, cluster)
    assert [
        tuple(r.ranks for r in pipeline.stages[0].replicas) for pipeline in exchange.pipelines
    ] == [((2, 8), (1, 5)), ((0, 4), (3, 9))]


def test_only_as_many_ranks_of_the_same_chip_are_exchanged() -> None:
    cluster = nodes_of("a-mini", "c-mini")
    assert not list(exchanged(plan_of(cluster, ((0,), (1,)), ((4,), (5,))), cluster))
    cluster = nodes_of("a-mini", "a-mini")
    assert not list(exchanged(plan_of(cluster, ((0, 1), (2, 3)), ((4,), (5,))), cluster))
    assert not list(exchanged(plan_of(cluster, ((0,), (1,)), ((2,), (3,))), cluster))


@pytest.mark.parametrize("seed", range(20))
def test_every_exchange_that_puts_stages_elsewhere_is_there_once(seed: int) -> None:
    generator = random.Random(seed)
    cluster = nodes_of(*generator.choices(["a-mini", "c-mini"], k=3))
    ranks = generator.sample(range(12), 12)
    plan = plan_of_pairs(cluster, ranks)
    validate(plan)
    found = list(exchanged(plan, cluster))
    for other in found:
        validate(other)
        assert sorted(ranks_of(other)) == sorted(ranks_of(plan))
        for stage in other.pipelines[0].stages:
            assert tuple(replica.batch_share for replica in stage.replicas) == SHARES
            for replica in stage.replicas:
                assert replica.chip == cluster.node(replica.ranks[0]).chip_name
    elsewhere, within = set(), set()
    for i, j in itertools.combinations(range(12), 2):
        if cluster.node(ranks[i]).chip_name == cluster.node(ranks[j]).chip_name:
            order = list(ranks)
            order[i], order[j] = ranks[j], ranks[i]
            other = plan_of_pairs(cluster, order)
            if i // 2 != j // 2:
                elsewhere.add(nodes_by_stage(other, cluster))
            elif cluster.node_index(ranks[i]) != cluster.node_index(ranks[j]):
                within.add(other)
    here = nodes_by_stage(plan, cluster)
    elsewhere.discard(here)
    nodes = Counter(nodes_by_stage(other, cluster) for other in found)
    assert nodes.pop(here, 0) == len(within)
    assert nodes == Counter(elsewhere)
    assert within <= set(found)


def plan_of_pairs(cluster: Cluster, ranks: list[int]) -> Plan:
    """A plan of stages that have two of these ranks each, in turn, as replicas."""
    return plan_of(cluster, *(((ranks[i],), (ranks[i + 1],)) for i in range(0, len(ranks), 2)))
