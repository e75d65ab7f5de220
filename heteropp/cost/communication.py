"""Seconds of messages between ranks: collectives as dicomm runs them, and resharding."""

from __future__ import annotations

import math
from collections import defaultdict

from heteropp.description.cluster import Cluster, Link
from heteropp.description.plan import Resharding, Stage
from heteropp.layout.resharding import group_boxes, messages
from heteropp.models.spec import ModelSpec

FEW_RANKS = 8  # up to so many, everyone sends to everyone


def all_reduce_s(size_bytes: float, ranks: int, link: Link) -> float:
    """Returns the seconds that the all-reduce of a vector takes.

    Every rank sends a short vector to all others; a long one goes through a reduce-scatter and an
    all-gather.
    """
    if ranks == 1:
        return 0.0
    if ranks > FEW_RANKS and size_bytes <= 16 << 10:
        return _rounds(ranks) * link.seconds(size_bytes)  # recursive doubling
    if ranks > FEW_RANKS and size_bytes <= 512 << 10:  # recursive halving
        share = 2 * size_bytes * (ranks - 1) / ranks
        return (2 * _rounds(ranks) - 1) * link.latency_s + link.seconds(share)
    if size_bytes > 16 << 10:
        return 2 * all_gather_s(size_bytes, ranks, link)
    return all_gather_s(size_bytes * ranks, ranks, link)


def all_gather_s(size_bytes: float, ranks: int, link: Link) -> float:
    """Returns the seconds that an all-gather takes whose result has `size_bytes`.

    Each rank sends its piece to every other rank, one after another. With more than FEW_RANKS
    ranks, pieces go round a ring, or by recursive doubling when they are short. A reduce-scatter
    takes as long.
    """
    if ranks == 1:
        return 0.0
    share = size_bytes * (ranks - 1) / ranks
    if ranks <= FEW_RANKS:
        return link.seconds(share)
    steps = _rounds(ranks) if size_bytes <= 64 << 10 else ranks - 1
    return (steps - 1) * link.latency_s + link.seconds(share)


def broadcast_s(size_bytes: float, ranks: int, link: Link) -> float:
    """Returns the seconds that a broadcast takes.

    Short messages, and those among few ranks, go down a binomial tree, whose root sends one message
    after another without waiting for their arrival; others are scattered and gathered.
    """
    if ranks == 1:
        return 0.0
    if ranks <= 3 or size_bytes <= 64 << 10:
        depth = ranks.bit_length() - 1
        return depth * link.latency_s + _rounds(ranks) * size_bytes / link.bytes_per_s
    dealt_s = link.seconds(size_bytes * (ranks - 1) / ranks)
    return dealt_s + all_gather_s(size_bytes, ranks, link)


def _rounds(ranks: int) -> int:
    return math.ceil(math.log2(ranks))


def resharding_s(
    model: ModelSpec, sender: Stage, receiver: Stage, cluster: Cluster, strategy: Resharding
) -> float:
    """Returns the seconds from when a stage has computed one micro-batch's boundary tensor until
    every replica of the next stage has its part of it whole.
    """
    row_bytes = model.hidden * model.dtype_bytes
    sent: dict[tuple[int, int], float] = defaultdict(float)  # by pair of ranks
    for message in messages(sender, receiver, model.sequence_length, strategy):
        pair = message.source, message.destination
        sent[pair] += message.box.shape[0] * row_bytes
    latest_s = 0.0
    for r, replica in enumerate(receiver.replicas):
        for c in range(receiver.cp):
            boxes, ranks = group_boxes(receiver, r, c, model.sequence_length), replica.group(c)
            arrived_s = max(
                cluster.link(*pair).seconds(size_bytes)
                for pair, size_bytes in sent.items()
                if pair[1] in ranks
            )
            whole_bytes = sum(box.size for box in boxes) * row_bytes
            gathered_s = gather_boundary_s(
                whole_bytes, len(ranks), _slowest(cluster, ranks), strategy
            )
            latest_s = max(latest_s, arrived_s + gathered_s)
    return latest_s


def gather_boundary_s(size_bytes: float, ranks: int, link: Link, strategy: Resharding) -> float:
    """Returns the seconds from a boundary tensor's arrival at a replica until every one of the
    replica's ranks has all of it.
    """
    if strategy == "all-gather":
        return all_gather_s(size_bytes, ranks, link)
    return broadcast_s(size_bytes, ranks, link) if strategy == "broadcast" else 0.0


def _slowest(cluster: Cluster, ranks: tuple[int, ...]) -> Link:
    links = [cluster.link(ranks[0], peer) for peer in ranks[1:]]
    return min(links, key=lambda link: link.bytes_per_s, default=Link(0.0, float("inf")))
