"""The nodes on which stages lie, and which plans differ only in the names of alike nodes."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Sequence

from heteropp.description.cluster import Cluster
from heteropp.description.plan import Replica, Stage

Runs = list[tuple[int, int]]  # nodes, and how many ranks follow one another there


def replica_nodes(replica: Replica, cluster: Cluster) -> tuple[int, ...]:
    """Returns the nodes of a replica, by rank."""
    return tuple(map(cluster.node_index, replica.ranks))


def stage_nodes(stage: Stage, cluster: Cluster) -> Runs:
    """Returns the nodes of a stage's ranks, replica by replica."""
    nodes = (cluster.node_index(rank) for replica in stage.replicas for rank in replica.ranks)
    return [(node, len(list(ranks))) for node, ranks in itertools.groupby(nodes)]


def nodes_key(stages: Sequence[Runs], cluster: Cluster, named: Collection[int] = ()) -> Hashable:
    """Returns a key that is equal for lists of stages that lie on the same nodes or on alike ones.
    Nodes are alike if every message takes the same time there; the NICs that the ranks of a node
    use and its host memory are not compared.

    named: nodes that are told apart from all others, even from alike ones.
    """
    numbers: dict[int, int] = {}
    return tuple(
        tuple(
            (-1 - node, ranks)
            if node in named
            else (numbers.setdefault(node, len(numbers)), cluster.node_kinds[node], ranks)
            for node, ranks in runs
        )
        for runs in stages
    )
