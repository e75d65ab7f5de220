"""Replicas go to other stages: one moves to another, or two stages exchange one each."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from dataclasses import replace

from heteropp.description.cluster import Cluster
from heteropp.description.plan import Plan, Stage
from heteropp.search.auto.changed import places, with_one, with_stages
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
    """Two stages exchange the ranks of a replica of each, which are as many of the same chip: once
    for every set of nodes on which stages lie then. Where a stage's replicas lie decides which
    links its reductions and its messages take.
    """
    known = {_nodes(plan, cluster)}
    for (p, s, one), (q, t, other) in itertools.combinations(places(plan), 2):
        for i, j in itertools.product(range(one.dp), range(other.dp)):
            a, b = one.replicas[i], other.replicas[j]
            if a.chip == b.chip and len(a.ranks) == len(b.ranks):
                made = with_one(plan, p, s, _with_ranks(one, i, b.ranks))
                made = with_one(made, q, t, _with_ranks(other, j, a.ranks))
                nodes = _nodes(made, cluster)
                if nodes not in known:
                    known.add(nodes)
                    yield made


def _with_ranks(stage: Stage, r: int, ranks: tuple[int, ...]) -> Stage:
    """Returns a stage of whose replicas that one has other ranks."""
    replicas = list(stage.replicas)
    replicas[r] = replace(replicas[r], ranks=ranks)
    return replace(stage, replicas=tuple(replicas))


def _nodes(plan: Plan, cluster: Cluster) -> Hashable:
    """Returns the nodes on which the ranks of each replica of each stage lie."""
    return tuple(
        tuple(sorted(tuple(map(cluster.node_index, r.ranks)) for r in stage.replicas))
        for _, _, stage in places(plan)
    )
