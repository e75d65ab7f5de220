"""Replicas go elsewhere: one moves to another stage, or two exchange their ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from heteropp.description.cluster import Cluster
from heteropp.description.plan import Plan, Stage
from heteropp.search.auto.alike_nodes import replica_nodes
from heteropp.search.auto.changed import (
    exchange_kind,
    places,
    with_one,
    with_ranks,
    with_stages,
)
from heteropp.search.auto.joining import scaled, with_replica


def moved(plan: Plan) -> Iterator[Plan]:
    """A replica moves to another stage of its pipeline and takes an even share there, or less."""
    for p, pipeline in enumerate(plan.pipelines):
        for i, j in itertools.permutations(range(len(pipeline.stages)), 2):
            giver, taker = pipeline.stages[i], pipeline.stages[j]
            if giver.dp == 1 or (giver.tp, giver.cp) != (taker.tp, taker.cp):
                continue
            for chip in dict.fromkeys(replica.chip for replica in giver.replicas):
                one = next(replica for replica in giver.replicas if replica.chip == chip)
                left = tuple(replica for replica in giver.replicas if replica != one)
                stages = list(pipeline.stages)
                stages[i] = scaled(replace(giver, replicas=left), plan.micro_batch)
                for joined in with_replica(taker, one, plan.micro_batch):
                    stages[j] = joined
                    yield with_stages(plan, p, stages)


def exchanged(plan: Plan, cluster: Cluster) -> Iterator[Plan]:
    """Two replicas of the same chip and size exchange their ranks, in two stages or in one. Nodes
    decide which links the messages and reductions of a stage take, so only replicas on other nodes
    are exchanged; to keep these few, of a stage's replicas on the same nodes only the first.
    """
    held = [(p, s, stage, _by_nodes(stage, cluster)) for p, s, stage in places(plan)]
    for (p, s, one, firsts), (q, t, other, other_firsts) in itertools.combinations(held, 2):
        for (i, nodes), (j, other_nodes) in itertools.product(firsts, other_firsts):
            a, b = one.replicas[i], other.replicas[j]
            if nodes != other_nodes and exchange_kind(a) == exchange_kind(b):
                made = with_one(plan, p, s, with_ranks(one, {i: b.ranks}))
                yield with_one(made, q, t, with_ranks(other, {j: a.ranks}))
    if len(held) == 1:
        return  # nothing lies beside the stage, so that its replicas' order matters little
    for p, s, stage, firsts in held:
        for (i, _), (j, _) in itertools.combinations(firsts, 2):
            a, b = stage.replicas[i], stage.replicas[j]
            if exchange_kind(a) == exchange_kind(b):
                yield with_one(plan, p, s, with_ranks(stage, {i: b.ranks, j: a.ranks}))


def _by_nodes(stage: Stage, cluster: Cluster) -> list[tuple[int, tuple[int, ...]]]:
    """Returns the number and the nodes, by rank, of those of a stage's replicas that are the first
    on their nodes.
    """
    first: dict[tuple[int, ...], int] = {}
    for r, replica in enumerate(stage.replicas):
        first.setdefault(replica_nodes(replica, cluster), r)
    return [(r, nodes) for nodes, r in first.items()]
