"""Seconds of messages between ranks: collectives as dicomm runs them, and resharding."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Literal

from heteropp.cluster import Cluster, Link
from heteropp.model import Model
from heteropp.plan import Stage
from heteropp.reshard import messages, replica_box

FEW_RANKS = 8  # up to so many, everyone sends to everyone

Strategy = Literal["all-gather", "broadcast", "direct"]


def all_reduce_s(size_bytes: float, ranks: int, link: Link) -> float:
    """Of a vector: to everyone when short, else a reduce-scatter and an all-gather."""
    if ranks == 1:
        return 0.0
    if ranks > FEW_RANKS and size_bytes <= 16 << 10:
        return _rounds(ranks) * link.seconds(size_bytes)  # recursive doubling
    if ranks > FEW_RANKS and size_bytes <= 512 << 10:  # recursive halving
        share = 2 * size_bytes * (ranks - 1) / ranks
        return (2 * _rounds(ranks) - 1) * link.latency_s + link.seconds(share)
    if size_bytes > (64 << 10 if ranks == 2 else 16 << 10):
        return 2 * all_gather_s(size_bytes, ranks, link)
    return all_gather_s(size_bytes * ranks, ranks, link)


def all_gather_s(size_bytes: float, ranks: int, link: Link) -> float:
    """Of `size_bytes` in all: each rank sends its piece to every other, one after another.

    Among many, pieces go round a ring, or double when short. A reduce-scatter costs the same.
    """
    if ranks == 1:
        return 0.0
    share = size_bytes * (ranks - 1) / ranks
    if ranks <= FEW_RANKS:
        return link.seconds(share)
    steps = _rounds(ranks) if size_bytes <= 64 << 10 else ranks - 1
    return (steps - 1) * link.latency_s + link.seconds(share)


def broadcast_s(size_bytes: float, ranks: int, link: Link) -> float:
    """Down a tree when short or among few, else dealt out and gathered again."""
    if ranks == 1:
        return 0.0
    if ranks <= 3 or size_bytes <= 64 << 10:
        return _rounds(ranks) * link.seconds(size_bytes)
    return 2 * all_gather_s(size_bytes, ranks, link)


def _rounds(ranks: int) -> int:
    return math.ceil(math.log2(ranks))


def resharding_s(
    model: Model, sender: Stage, receiver: Stage, cluster: Cluster, strategy: Strategy
) -> float:
    """From one micro-batch's tensor being ready at a stage to its being whole at the next.

    "all-gather" (section 5, figure 10): every receiving rank is sent its own share of the rows,
    and the replica gathers; "broadcast": one rank of each receiving replica is sent all of them,
    by the first of those that hold them, and passes them on; "direct": every receiving rank is
    sent all of them.
    """
    row_bytes = model.hidden * model.dtype_bytes
    length = model.sequence_length
    latest_s = 0.0
    for r, replica in enumerate(receiver.replicas):
        whole_bytes = replica_box(receiver, r, length).shape[0] * row_bytes
        sent: dict[tuple[int, int], float] = defaultdict(float)  # by pair of ranks
        inside = _slowest(cluster, replica.ranks)
        passed_on_s = 0.0
        if strategy == "all-gather":
            for message in messages(sender, receiver, length):
                if message.destination in replica.ranks:
                    pair = message.source, message.destination
                    sent[pair] += message.box.shape[0] * row_bytes
            passed_on_s = all_gather_s(whole_bytes, len(replica.ranks), inside)
        else:
            wanted = replica_box(receiver, r, length)
            destinations = replica.ranks[:1] if strategy == "broadcast" else replica.ranks
            for s, sending in enumerate(sender.replicas):
                common = replica_box(sender, s, length).intersect(wanted)
                for i, destination in enumerate(destinations if common else ()):
                    assert common is not None
                    source = sending.ranks[i % len(sending.ranks)]
                    sent[source, destination] += common.shape[0] * row_bytes
            if strategy == "broadcast":
                passed_on_s = broadcast_s(whole_bytes, len(replica.ranks), inside)
        arrived_s = max(
            cluster.link(*pair).seconds(size_bytes) for pair, size_bytes in sent.items()
        )
        latest_s = max(latest_s, arrived_s + passed_on_s)
    return latest_s


def _slowest(cluster: Cluster, ranks: tuple[int, ...]) -> Link:
    links = [cluster.link(ranks[0], peer) for peer in ranks[1:]]
    return min(links, key=lambda link: link.bytes_per_s, default=Link(0.0, float("inf")))
