"""Seconds of collectives as dicomm runs them, and of gathering boundary tensors."""

from __future__ import annotations

import math

from heteropp.description.cluster import Link
from heteropp.description.plan import Resharding

NO_LINK = Link(0.0, math.inf)  # of a rank that has nobody to send to
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


def gather_boundary_s(size_bytes: float, ranks: int, link: Link, strategy: Resharding) -> float:
    """Returns the seconds from a boundary tensor's arrival at a replica until every one of the
    replica's ranks has all of it.
    """
    if strategy == "all-gather":
        return all_gather_s(size_bytes, ranks, link)
    return broadcast_s(size_bytes, ranks, link) if strategy == "broadcast" else 0.0
