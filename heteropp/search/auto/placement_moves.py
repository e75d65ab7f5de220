"""The ranks of all replicas are dealt anew, so that replicas lie on nodes in a regular way."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

from heteropp.description.cluster import Cluster
from heteropp.description.plan import Plan
from heteropp.search.auto.alike_nodes import nodes_key, replica_nodes, stage_nodes
from heteropp.search.auto.changed import exchange_kind, places, with_one, with_ranks

Ranks = tuple[int, ...]
# Returns the number of the node for replica r of stage s of pipeline p; numbers go round.
Placement = Callable[[int, int, int], int]
PLACEMENTS: tuple[Placement, ...] = (
    lambda p, s, r: p,  # the messages of a pipeline stay in the node, as far as it has room
    lambda p, s, r: r,  # messages between stages of equally many replicas stay in the node
    lambda p, s, r: s,  # the reductions of a stage stay in the node
    lambda p, s, r: p + s + r,  # as few messages and reductions as possible stay in a node
)


def placed_anew(plan: Plan, cluster: Cluster) -> Iterator[Plan]:
    """Yields the plan with the ranks of all replicas dealt anew, once for each placement that
    differs from the plan's own. Replicas of the same chip and size get one another's ranks. Of
    placements that differ only in which of several alike nodes comes first, one is yielded.
    """
    known = {_key(plan, cluster)}
    for placement in PLACEMENTS:
        made = _dealt(plan, cluster, placement)
        key = _key(made, cluster)
        if key not in known:
            known.add(key)
            yield made


def _key(plan: Plan, cluster: Cluster) -> Hashable:
    return nodes_key([stage_nodes(stage, cluster) for _, _, stage in places(plan)], cluster)


def _dealt(plan: Plan, cluster: Cluster, placement: Placement) -> Plan:
    """Returns the plan with each replica on its node, or on the next one that has ranks left. For
    replicas that lie on several nodes, these nodes together count as one.
    """
    left = _ranks_by_nodes(plan, cluster)
    made = plan
    for p, s, stage in places(plan):
        ranks = {}
        for r, replica in enumerate(stage.replicas):
            nodes = left[exchange_kind(replica)]
            first = placement(p, s, r)
            turns = (nodes[(first + i) % len(nodes)] for i in range(len(nodes)))
            ranks[r] = next(own for own in turns if own).pop(0)
        made = with_one(made, p, s, with_ranks(stage, ranks))
    return made


def _ranks_by_nodes(plan: Plan, cluster: Cluster) -> dict[Hashable, list[list[Ranks]]]:
    """Returns the ranks of each kind of replicas in order, apart by the nodes that they lie on."""
    replicas = (replica for _, _, stage in places(plan) for replica in stage.replicas)
    found: dict[Hashable, dict[Ranks, list[Ranks]]] = {}
    for replica in sorted(replicas, key=lambda replica: replica.ranks):
        nodes = replica_nodes(replica, cluster)
        found.setdefault(exchange_kind(replica), {}).setdefault(nodes, []).append(replica.ranks)
    return {kind: list(by_nodes.values()) for kind, by_nodes in found.items()}
