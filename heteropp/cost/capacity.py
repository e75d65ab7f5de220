"""Whether chips have the memory that a plan needs, and hosts what it offloads there.

Offloaded stages wait in their nodes' host memory (Zorse, sections 4.1.1 and 4.1.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import sub
from typing import NamedTuple

from heteropp.cost.documents import documents_bytes
from heteropp.cost.planned import human_bytes, rank_memory
from heteropp.cost.stage_memory import Memory
from heteropp.description.cluster import Cluster
from heteropp.description.plan import Plan, PlanError


def check_memory(plan: Plan, cluster: Cluster, documents_apart: bool = False) -> None:
    """Raises PlanError naming the stage that overruns its chips most, the need and the capacity; or
    the node whose host memory offloading overruns.

    documents_apart: attention is within documents, of which a sequence has several.
    """
    if most_lacking(plan, cluster, documents_apart)[0] > 0:
        why = ", where attention is within documents" if documents_apart else ""
        raise PlanError(overrun(plan, cluster, documents_apart) + why)
    if host := lacking_host(plan, cluster):
        raise PlanError(host_overrun(host))


def fits(plan: Plan, cluster: Cluster) -> bool:
    return lacking_bytes(plan, cluster) == (0, 0)


def lacking_bytes(plan: Plan, cluster: Cluster) -> tuple[int, int]:
    """Returns what the chip and the host that lack most are short of; (0, 0): the plan fits."""
    host = lacking_host(plan, cluster)
    return max(0, most_lacking(plan, cluster)[0]), host.lacking_bytes if host else 0


def most_lacking(plan: Plan, cluster: Cluster, documents_apart: bool = False) -> tuple[int, int]:
    """The most bytes that a rank needs beyond its chip's memory, and the first such rank."""
    needs = [memory.total for memory in rank_memory(plan, cluster)]
    if documents_apart:
        needs = [need + documents_bytes(plan, rank) for rank, need in enumerate(needs)]
    excess_bytes = list(map(sub, needs, cluster.capacity_bytes))
    most_bytes = max(excess_bytes)
    return most_bytes, excess_bytes.index(most_bytes)


def lacking_host(plan: Plan, cluster: Cluster) -> HostNeed | None:
    """Returns the node whose room for offloading is exceeded by the largest factor; None where no
    node's is.
    """
    offloads = any(stage.offload for pipeline in plan.pipelines for stage in pipeline.stages)
    if not offloads or all(node.host_memory_bytes is None for node in cluster.nodes):
        return None
    fullest = fullest_host(cluster, rank_memory(plan, cluster))
    return fullest if fullest and fullest.lacking_bytes else None


def overrun(plan: Plan, cluster: Cluster, documents_apart: bool = False) -> str:
    """What the rank that lacks most memory needs, and has; or the host, where chips have enough."""
    excess_bytes, rank = most_lacking(plan, cluster, documents_apart)
    if excess_bytes <= 0 and (host := lacking_host(plan, cluster)):
        return host_overrun(host)
    capacity_bytes = cluster.capacity_bytes[rank]
    _, s, _, _ = plan.place(rank)
    return (
        f"stage {s} needs {human_bytes(excess_bytes + capacity_bytes)} on rank {rank} "
        f"(chip {plan.chip(rank)}), which has {human_bytes(capacity_bytes)}"
    )


def host_overrun(host: HostNeed) -> str:
    return (
        f"offloading needs {human_bytes(host.bytes)} of host memory on node {host.node}, for which "
        f"the cluster file has {human_bytes(host.room_bytes or 0)}"
    )


class HostNeed(NamedTuple):
    """What a node's host holds at most."""

    node: str  # its name
    bytes: int
    room_bytes: int | None  # what the cluster file has room for; None: any amount

    @property
    def lacking_bytes(self) -> int:
        return 0 if self.room_bytes is None else max(0, self.bytes - self.room_bytes)


def fullest_host(cluster: Cluster, memory: Sequence[Memory]) -> HostNeed | None:
    """Returns the node that has the largest part of its room filled or, where no file limits any,
    the one whose host holds most; None where no host holds anything.

    memory: by rank. The peaks of a node's ranks are added up, as they come at about the same time.
    """
    needs = []
    for name, node in zip(cluster.node_names, cluster.nodes, strict=True):
        if held := sum(own.host for own in memory[node.ranks.start : node.ranks.stop]):
            needs.append(HostNeed(name, held, node.host_memory_bytes))
    return max(needs, key=lambda n: (n.bytes / (n.room_bytes or inf), n.bytes), default=None)
