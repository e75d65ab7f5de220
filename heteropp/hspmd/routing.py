"""Who sends whom which slice: batched send/recv, and sums of slices (Hetu v2, section 4.3).

The boxes that ranks hold and want cut a tensor into its finest slices. Each slice that a rank wants
comes from one that holds it, by three rules: from itself if it holds it, else over the fastest
link, else from whoever has least to send. A slice that is a sum comes from one holder of each
summand; where several ranks want it, each sums a part of it and hands that on to the others.

Several tensors are routed at once, so that loads are balanced over all of them (section 6.2).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from heteropp.boxes import Box
from heteropp.hspmd.annotation import Summand

Link = tuple[int, int]  # from rank, to rank
BytesPerS = Callable[[int, int], float]  # of the link from one rank to another


def alike(_source: int, _destination: int) -> float:
    """All links are equally fast."""
    return 1.0


@dataclass(frozen=True)
class Held:
    """A box of a tensor that a rank holds: the value itself, or a summand of it."""

    tensor: int
    rank: int
    box: Box
    summand: Summand | None = None


@dataclass(frozen=True)
class Wanted:
    """A box of a tensor that a rank shall hold: what is held as that, or the sum of several."""

    tensor: int
    rank: int
    box: Box
    summands: tuple[Summand | None, ...] = (None,)


@dataclass(frozen=True)
class Transfer:
    """A slice on its way: the receiver adds up the senders', in their order. It may be one."""

    tensor: int
    box: Box
    senders: tuple[int, ...]
    receiver: int
    size_bytes: int


Round = tuple[Transfer, ...]  # all of them at once; what one round brings the next may send


class RoutingError(ValueError):
    """What a rank wants is held by none; one sentence."""


def route(
    held: Sequence[Held],
    wanted: Sequence[Wanted],
    itemsizes: Sequence[int],
    bytes_per_s: BytesPerS = alike,
) -> list[Round]:
    """The rounds, at most two, in which ranks get what they want. Raises RoutingError.

    itemsizes: bytes of an element, by tensor. Slices with the fewest holders are routed first, and
    of those the largest, since others can give way to them.
    """
    router = _Router(itemsizes, bytes_per_s)
    rows = _table(held, wanted)
    rows.sort(key=lambda row: (row.choices, -math.prod(row.box.shape) * itemsizes[row.tensor]))
    first: list[Transfer] = []
    second: list[Transfer] = []
    for row in rows:
        if len(row.holders) == 1 or len(row.receivers) == 1:
            first += (router.transfer(row, row.box, receiver) for receiver in row.receivers)
            continue
        for receiver, piece in _pieces(row.box, row.receivers):
            first.append(router.transfer(row, piece, receiver))
            summed = _Row(row.tensor, piece, [[receiver]], row.receivers)
            others = (other for other in row.receivers if other != receiver)
            second += (router.transfer(summed, piece, other) for other in others)
    return [tuple(transfers) for transfers in (first, second) if transfers]


def volume_bytes(rounds: Iterable[Round]) -> dict[Link, int]:
    """What passes each link, in bytes."""
    result: Counter[Link] = Counter()
    for transfer in itertools.chain.from_iterable(rounds):
        for sender in transfer.senders:
            if sender != transfer.receiver:
                result[sender, transfer.receiver] += transfer.size_bytes
    return dict(result)


@dataclass(frozen=True)
class _Row:
    """Of the table: a slice, the ranks that hold it by summand, and those that want the sum."""

    tensor: int
    box: Box
    holders: list[list[int]]
    receivers: list[int]

    @property
    def choices(self) -> int:
        return min(len(ranks) for ranks in self.holders)


class _Router:
    def __init__(self, itemsizes: Sequence[int], bytes_per_s: BytesPerS) -> None:
        self.itemsizes, self.bytes_per_s = itemsizes, bytes_per_s
        self.sent_bytes: Counter[int] = Counter()  # by rank

    def transfer(self, row: _Row, box: Box, receiver: int) -> Transfer:
        size_bytes = math.prod(box.shape) * self.itemsizes[row.tensor]
        senders = tuple(self._sender(ranks, receiver) for ranks in row.holders)
        for sender in senders:
            if sender != receiver:
                self.sent_bytes[sender] += size_bytes
        return Transfer(row.tensor, box, senders, receiver, size_bytes)

    def _sender(self, holders: list[int], receiver: int) -> int:
        if receiver in holders:
            return receiver
        return min(
            holders,
            key=lambda rank: (-self.bytes_per_s(rank, receiver), self.sent_bytes[rank], rank),
        )


def _table(held: Sequence[Held], wanted: Sequence[Wanted]) -> list[_Row]:
    """One row for each finest slice that someone wants."""
    holders: dict[int, dict[Box, dict[Summand | None, list[int]]]] = defaultdict(dict)
    for h in held:
        holders[h.tensor].setdefault(h.box, defaultdict(list))[h.summand].append(h.rank)
    receivers: dict[tuple[int, Box, tuple[Summand | None, ...]], list[int]] = defaultdict(list)
    boxes: dict[int, set[Box]] = {tensor: set(found) for tensor, found in holders.items()}
    for w in wanted:
        receivers[w.tensor, w.box, w.summands].append(w.rank)
        boxes.setdefault(w.tensor, set()).add(w.box)
    edges = {tensor: _edges(found) for tensor, found in boxes.items()}
    rows: dict[tuple[int, Box, tuple[Summand | None, ...]], _Row] = {}
    for (tensor, box, summands), ranks in receivers.items():
        near = [(b, by) for b, by in holders[tensor].items() if b.intersect(box) is not None]
        for piece in _finest(box, edges[tensor]):
            found = [by for b, by in near if b.intersect(piece) == piece]
            by_summand = [
                [rank for by in found for rank in by.get(summand, ())] for summand in summands
            ]
            if not all(by_summand):
                raise RoutingError(
                    f"rank {ranks[0]} wants {list(piece.ranges)} of tensor {tensor}, "
                    "which no rank holds"
                )
            row = rows.setdefault((tensor, piece, summands), _Row(tensor, piece, by_summand, []))
            row.receivers.extend(ranks)
    return list(rows.values())


def _edges(boxes: Iterable[Box]) -> list[list[int]]:
    """By dimension, where boxes begin and end."""
    by_dimension = zip(*(box.ranges for box in boxes), strict=True)
    return [sorted({edge for pair in ranges for edge in pair}) for ranges in by_dimension]


def _finest(box: Box, edges: list[list[int]]) -> Iterable[Box]:
    cuts = []
    for (first, last), found in zip(box.ranges, edges, strict=True):
        cuts.append(list(itertools.pairwise(edge for edge in found if first <= edge <= last)))
    return (Box(ranges) for ranges in itertools.product(*cuts))


def _pieces(box: Box, receivers: Sequence[int]) -> Iterable[tuple[int, Box]]:
    """A part of the box for each receiver, as equal as they can be along its longest dimension."""
    if not box.ranges:
        yield receivers[0], box
        return
    dimension = max(range(len(box.shape)), key=box.shape.__getitem__)
    first, size = box.ranges[dimension][0], box.shape[dimension]
    for i, receiver in enumerate(receivers):
        begin, end = (first + size * turn // len(receivers) for turn in (i, i + 1))
        if begin < end:
            ranges = list(box.ranges)
            ranges[dimension] = begin, end
            yield receiver, Box(tuple(ranges))
