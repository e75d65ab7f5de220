"""The ranks of all replicas are dealt anew, so that replicas lie on nodes in a regular way."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from clusters import cluster_of, tiny_model

from ditorch.chips import load_chip
from heteropp.description.cluster import Cluster
from heteropp.description.plan import Pipeline, Plan, Replica, Stage
from heteropp.search.auto.changed import places
from heteropp.search.auto.freedom import Freedom
from heteropp.search.auto.moves import neighbours
from heteropp.search.auto.placement_moves import placed_anew
from heteropp.search.auto.trials import Draft, ranks_of
from heteropp.search.planner import OPTIONS, Request


def nodes_of(*nodes: tuple[str, int]) -> Cluster:
    """A cluster of nodes of a chip and their number."""
    return cluster_of(*((chip, load_chip(chip), count) for chip, count in nodes))


def plan_of(
    cluster: Cluster, shape: tuple[int, int, int], groups: Sequence[tuple[int, ...]]
) -> Plan:
    """A plan of so many pipelines, stages of each and replicas of each of these.

    groups: the ranks of each replica, in order.
    """
    pipelines, stages, replicas = shape
    made = [replica_of(cluster, ranks) for ranks in groups]
    held = [tuple(made[i : i + replicas]) for i in range(0, len(made), replicas)]
    return Plan(
        model=tiny_model(stages),
        global_batch=2 * replicas * pipelines,
        micro_batch=replicas,
        schedule="1f1b",
        zero_stage=1,
        pipelines=tuple(
            Pipeline(
                micro_batches=2,
                stages=tuple(
                    Stage(layers=(s, s + 1), recompute=False, replicas=held[p * stages + s])
                    for s in range(stages)
                ),
            )
            for p in range(pipelines)
        ),
    )


def replica_of(cluster: Cluster, ranks: tuple[int, ...]) -> Replica:
    """A tensor-parallel group of ranks of one chip; ranks of two chips cut sequences."""
    chips = tuple(cluster.node(rank).chip_name for rank in ranks)
    replica = Replica(ranks=ranks, chip=chips[0], batch_share=1)
    if len(set(chips)) > 1:
        replica = replace(replica, token_shares=(8, 8), group_chips=chips)
    return replica


def placement_of(plan: Plan, cluster: Cluster) -> tuple[int, ...]:
    """A number for the nodes of each replica, as they come."""
    nodes = [
        tuple(cluster.node_index(rank) for rank in replica.ranks)
        for _, _, stage in places(plan)
        for replica in stage.replicas
    ]
    numbers = {own: number for number, own in enumerate(dict.fromkeys(nodes))}
    return tuple(numbers[own] for own in nodes)


TWO_NODES = nodes_of(("a-mini", 4), ("a-mini", 4))
THREE_NODES = nodes_of(("a-mini", 3), ("a-mini", 3), ("a-mini", 3))
FOUR_NODES = nodes_of(*[("a-mini", 4)] * 4)
SHARED_NODE = nodes_of(("a-mini", 8), ("a-mini", 4), ("a-mini", 4))
BY_PIPELINE, BY_STAGE = (0, 0, 0, 0, 1, 1, 1, 1), (0, 0, 1, 1, 0, 0, 1, 1)
BY_REPLICA, BY_NONE = (0, 1, 0, 1, 0, 1, 0, 1), (0, 1, 1, 0, 1, 0, 0, 1)
TWO_TIMES = (2, 2, 2), [BY_PIPELINE, BY_STAGE, BY_REPLICA, BY_NONE]


@pytest.mark.parametrize(
    ("cluster", "groups", "shape", "expected"),
    [
        (TWO_NODES, [(n,) for n in range(8)], *TWO_TIMES),
        (FOUR_NODES, [(n, n + 4) for n in (*range(4), *range(8, 12))], *TWO_TIMES),
        (SHARED_NODE, [(n, n + 8) for n in range(8)], *TWO_TIMES),
        (
            THREE_NODES,
            [(n,) for n in range(9)],
            (1, 3, 3),
            [(0, 0, 0, 1, 1, 1, 2, 2, 2), (0, 1, 2, 0, 1, 2, 0, 1, 2), (0, 1, 2, 1, 2, 0, 2, 0, 1)],
        ),
        (  # the second half of the stages no longer finds room on their nodes
            nodes_of(*[("a-mini", 2)] * 4),
            [(n,) for n in range(8)],
            (1, 4, 2),
            [(0, 0, 1, 1, 2, 2, 3, 3), (0, 1, 0, 1, 2, 2, 3, 3), (0, 1, 1, 2, 2, 3, 3, 0)],
        ),
    ],
    ids=["two nodes", "two pairs of nodes", "pairs that share a node", "three nodes", "four nodes"],
)
def test_replicas_are_placed_by_pipeline_by_stage_by_replica_and_by_none(
    cluster: Cluster,
    groups: list[tuple[int, ...]],
    shape: tuple[int, int, int],
    expected: list[tuple[int, ...]],
) -> None:
    """Each placement comes once, but not the one that the plan already has."""
    plan = plan_of(cluster, shape, groups)
    found = list(placed_anew(plan, cluster))
    placements = [placement_of(other, cluster) for other in (plan, *found)]
    assert Counter(placements) == Counter(expected)
    again = list(placed_anew(found[-1], cluster))
    assert placement_of(plan, cluster) in [placement_of(other, cluster) for other in again]
    request = Request(cluster=cluster, model=plan.model, global_batch=16, open=frozenset(OPTIONS))
    near = {draft.plan for kind in neighbours(Draft(plan), Freedom(request)) for draft in kind}
    assert set(found) <= near


def test_placements_that_are_the_same_come_once() -> None:
    """Pipelines of one stage each lie by pipeline as they lie by stage."""
    plan = plan_of(TWO_NODES, (2, 1, 2), [(0,), (4,), (5,), (1,)])
    placements = [placement_of(other, TWO_NODES) for other in placed_anew(plan, TWO_NODES)]
    assert placements == [(0, 0, 1, 1), (0, 1, 0, 1)]


def test_ranks_are_dealt_to_replicas_of_the_same_chips_and_size() -> None:
    cluster = nodes_of(("a-mini", 4), ("a-mini", 4), ("c-mini", 4))
    compared = 0
    for seed in range(20):
        generator = random.Random(seed)
        ranks = iter(generator.sample(range(12), 12))
        sizes = generator.sample([1, 1, 1, 1, 2, 2, 2, 2], 8)
        groups = [tuple(sorted(itertools.islice(ranks, size))) for size in sizes]
        plan = plan_of(cluster, (2, 2, 2), groups)
        for other in placed_anew(plan, cluster):
            assert sorted(ranks_of(other)) == list(range(12))
            for (_, _, before), (_, _, after) in zip(places(plan), places(other), strict=True):
                for old, new in zip(before.replicas, after.replicas, strict=True):
                    assert new == replica_of(cluster, new.ranks)
                    assert (new.chips, len(new.ranks)) == (old.chips, len(old.ranks))
            compared += 1
    assert compared > 20
