"""A plan's stages in other orders, over alike and unlike nodes."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from clusters import cluster_of, tiny_model

from ditorch.chips import load_chip
from heteropp.description.cluster import Cluster
from heteropp.description.plan import Pipeline, Plan, Replica, Stage, validate
from heteropp.search.auto.freedom import Freedom
from heteropp.search.auto.moves import neighbours
from heteropp.search.auto.order_moves import reordered
from heteropp.search.auto.trials import Draft
from heteropp.search.planner import OPTIONS, Request


def nodes_of(*sizes: int) -> Cluster:
    """A cluster of nodes of so many chips, all of one type."""
    return cluster_of(*(("a-mini", load_chip("a-mini"), size) for size in sizes))


def pipeline_of(*stages: tuple[tuple[int, ...], ...], layers: int = 1) -> Pipeline:
    """A pipeline whose stages hold so many layers, but the last one more.

    stages: the ranks of each replica.
    """
    firsts = [layers * s for s in range(len(stages) + 1)]
    firsts[-1] += 1
    return Pipeline(
        micro_batches=2,
        stages=tuple(
            Stage(
                layers=span,
                recompute=False,
                replicas=tuple(
                    Replica(ranks=ranks, chip="a-mini", batch_share=4 // len(replicas))
                    for ranks in replicas
                ),
            )
            for span, replicas in zip(itertools.pairwise(firsts), stages, strict=True)
        ),
    )


def plan_of(*pipelines: Pipeline) -> Plan:
    return Plan(
        model=tiny_model(pipelines[0].stages[-1].layers[1]),
        global_batch=8 * len(pipelines),
        micro_batch=4,
        schedule="1f1b",
        zero_stage=1,
        pipelines=pipelines,
    )


def order_of(plan: Plan) -> tuple[int, ...]:
    return tuple(stage.replicas[0].ranks[0] for stage in plan.pipelines[0].stages)


def nodes_in_order(cluster: Cluster, order: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The size of each rank's node, and the number that it gets as the nodes come."""
    nodes = [cluster.node(rank).ranks for rank in order]
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    return tuple((len(node), numbers[node]) for node in nodes)


@pytest.mark.parametrize(
    ("sizes", "chips"), [((2, 2), 4), ((1, 3), 4), ((2, 1, 2), 5), ((4,), 4), ((2, 3), 4)]
)
def test_stages_come_in_every_order_of_nodes_once(sizes: tuple[int, ...], chips: int) -> None:
    """The orders are those in which two stages have changed places or one has gone elsewhere."""
    cluster = nodes_of(*sizes)
    plan = plan_of(pipeline_of(*(((rank,),) for rank in range(chips))))
    before = order_of(plan)
    expected = set()
    for order in itertools.permutations(before):
        moved = [rank for rank, old in zip(order, before, strict=True) if rank != old]
        shorter = any(
            [r for r in order if r != one] == [r for r in before if r != one] for one in before
        )
        if len(moved) == 2 or shorter:
            expected.add(nodes_in_order(cluster, order))
    expected.discard(nodes_in_order(cluster, before))
    found = list(reordered(plan, cluster))
    for other in found:
        validate(other)
    assert Counter(nodes_in_order(cluster, order_of(other)) for other in found) == Counter(expected)
    request = Request(cluster=cluster, model=plan.model, global_batch=8, open=frozenset(OPTIONS))
    near = {draft.plan for kind in neighbours(Draft(plan), Freedom(request)) for draft in kind}
    assert set(found) <= near


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (((0,), (1,)), ((2, 3),)),  # other degrees
        (((0,), (1,), (2,), (4,)), ((3,), (5,), (6,), (7,))),  # other parts of the nodes
    ],
)
def test_unlike_stages_change_places_with_their_layers(
    one: tuple[tuple[int, ...], ...], other: tuple[tuple[int, ...], ...]
) -> None:
    plan = plan_of(pipeline_of(one, other, layers=3))
    (found,) = reordered(plan, nodes_of(4, 4))
    validate(found)
    assert [
        (stage.layers, tuple(replica.ranks for replica in stage.replicas))
        for stage in found.pipelines[0].stages
    ] == [((0, 4), other), ((4, 7), one)]


@pytest.mark.parametrize(
    ("other", "orders"),
    [
        ((((2, 3),), ((6, 7),)), 2),  # on the same nodes
        ((((2, 3),), ((8, 9),)), 2),  # on one of them
        ((((8, 9),), ((10, 11),)), 0),  # on none of them
    ],
)
def test_nodes_that_another_pipeline_uses_are_not_alike(
    other: tuple[tuple[tuple[int, ...], ...], ...], orders: int
) -> None:
    own = ((0, 1),), ((4, 5),)
    plan = plan_of(pipeline_of(*own), pipeline_of(*other))
    found = list(reordered(plan, nodes_of(4, 4, 4)))
    assert len(found) == orders
    for p, made in enumerate(found):  # one of each pipeline
        stages = [tuple(r.ranks for r in stage.replicas) for stage in made.pipelines[p].stages]
        assert stages == [*reversed((own, other)[p])]
        assert made.pipelines[1 - p] == plan.pipelines[1 - p]
