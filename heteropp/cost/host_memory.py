"""What offloaded stages hold in their nodes' host memory (Zorse, sections 4.1.1 and 4.1.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from heteropp.cost.stage_memory import Memory
from heteropp.description.cluster import Cluster


class HostNeed(NamedTuple):
    """What a node's host holds at most."""

    node: int  # index of the cluster's
    bytes: int
    room_bytes: int | None  # what the cluster file has room for; None: any amount

    @property
    def fits(self) -> bool:
        return self.room_bytes is None or self.bytes <= self.room_bytes


def fullest_host(cluster: Cluster, memory: Sequence[Memory]) -> HostNeed | None:
    """Returns the node whose host lacks most, or else has most of its room filled; None where no
    host holds anything.

    memory: by rank. The peaks of a node's ranks are added up, as they come at about the same time.
    """
    held: dict[int, int] = {}
    for rank, own in enumerate(memory):
        if own.host:
            node = cluster.node_index(rank)
            held[node] = held.get(node, 0) + own.host
    needs = [HostNeed(n, size, cluster.nodes[n].host_memory_bytes) for n, size in held.items()]
    return max(needs, key=lambda need: need.bytes / (need.room_bytes or float("inf")), default=None)
