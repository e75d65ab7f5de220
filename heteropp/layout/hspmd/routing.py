"""Who sends whom which slice: batched send/recv, and sums of slices (Hetu v2, section 4.3).

The boxes that ranks hold and want cut a tensor into its finest slices. Each slice that a rank wants
comes from one that holds it, by three rules: from itself if it holds it, else over the fastest
link, else from whoever has least to send. A slice that is a sum comes from one holder of each
summand; where several ranks want it, each sums a part of it and hands that on to the others, or
each sums all of it.

Several tensors are routed at once, so that loads are balanced over all of them (section 6.2).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from heteropp.layout.boxes import Box
from heteropp.layout.hspmd.annotation import Summand

PARTS = 32  # of what a rank sends on average: a slice that is divided is cut as fine
LEAST_PART_BYTES = 4096

Link = tuple[int, int]  # from rank, to rank
BytesPerS = Callable[[int, int], float]  # of the link from one rank to another


def alike(_source: int, _destination: int) -> float:
    """All links are equally fast."""
    return 1.0


@dataclass(frozen=True)
class HeldBox:
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
    held: Sequence[HeldBox],
    wanted: Sequence[Wanted],
    itemsizes: Sequence[int],
    bytes_per_s: BytesPerS = alike,
    divide: bool = False,
    sums_shared: bool = True,
) -> list[Round]:
    """The rounds, at most two, in which ranks get what they want. Raises RoutingError.

    itemsizes: bytes of an element, by tensor; divide: large slices are cut, so that equal holders
    share them; sums_shared: a sum that several want is summed in parts, else in one round. Slices
    with the fewest holders are routed first, and of those the largest, since others can give way to
    them. Of holders that are all alike the first in `held` sends.
    """
    router = _Router(itemsizes, bytes_per_s)
    rows = _table(held, wanted)
    if divide:
        rows = _divided(rows, itemsizes)
    rows.sort(key=lambda row: (row.choices, -math.prod(row.box.shape) * itemsizes[row.tensor]))
    first: list[_Draft] = []
    second: list[_Draft] = []
    for row in rows:
        if len(row.holders) == 1 or len(row.receivers) == 1 or not sums_shared:
            first += (router.draft(row, row.box, receiver) for receiver in row.receivers)
            continue
        for receiver, piece in zip(row.receivers, _cut(row.box, len(row.receivers)), strict=False):
            first.append(router.draft(row, piece, receiver))
            summed = _Row(row.tensor, piece, [[receiver]], row.receivers)
            others = (other for other in row.receivers if other != receiver)
            second += (router.draft(summed, piece, other) for other in others)
    router.relieve(first)
    return [tuple(draft.transfer() for draft in drafts) for drafts in (first, second) if drafts]


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
    """A row of the table: a slice, the ranks that hold each of its summands, and the ranks that
    want the sum.
    """

    tensor: int
    box: Box
    holders: list[list[int]]
    receivers: list[int]

    @property
    def choices(self) -> int:
        return min(len(ranks) for ranks in self.holders)


@dataclass
class _Draft:
    """A transfer whose senders may still change: each summand's equals could send it as well."""

    tensor: int
    box: Box
    receiver: int
    size_bytes: int
    equals: list[list[int]]
    senders: list[int]

    def transfer(self) -> Transfer:
        return Transfer(self.tensor, self.box, tuple(self.senders), self.receiver, self.size_bytes)


class _Router:
    def __init__(self, itemsizes: Sequence[int], bytes_per_s: BytesPerS) -> None:
        self.itemsizes, self.bytes_per_s = itemsizes, bytes_per_s
        self.sent_bytes: Counter[int] = Counter()  # by rank

    def draft(self, row: _Row, box: Box, receiver: int) -> _Draft:
        size_bytes = math.prod(box.shape) * self.itemsizes[row.tensor]
        equals = [self._equals(ranks, receiver) for ranks in row.holders]
        senders = [self._least_loaded(ranks) for ranks in equals]
        for sender in senders:
            if sender != receiver:
                self.sent_bytes[sender] += size_bytes
        return _Draft(row.tensor, box, receiver, size_bytes, equals, senders)

    def relieve(self, drafts: Iterable[_Draft]) -> None:
        """Hands slices on to equals that send less, until none is better off for it.

        What the busiest then send, only others as busy hold: but for the size of a slice, the
        busiest could not send less.
        """
        open_ = [(d, i) for d in drafts for i, ranks in enumerate(d.equals) if len(ranks) > 1]
        changed = True
        while changed:
            changed = False
            for draft, i in open_:
                sender, other = draft.senders[i], self._least_loaded(draft.equals[i])
                if self.sent_bytes[other] + draft.size_bytes < self.sent_bytes[sender]:
                    self.sent_bytes[sender] -= draft.size_bytes
                    self.sent_bytes[other] += draft.size_bytes
                    draft.senders[i] = other
                    changed = True

    def _equals(self, holders: list[int], receiver: int) -> list[int]:
        """Returns the holders that may as well send a slice: the receiver itself if it is one, or
        else all that have the fastest link to it.
        """
        if receiver in holders:
            return [receiver]
        speeds = [self.bytes_per_s(rank, receiver) for rank in holders]
        fastest = max(speeds)
        return [rank for rank, speed in zip(holders, speeds, strict=True) if speed == fastest]

    def _least_loaded(self, ranks: list[int]) -> int:
        return min(ranks, key=self.sent_bytes.__getitem__)


def _table(held: Sequence[HeldBox], wanted: Sequence[Wanted]) -> list[_Row]:
    """One row for each finest slice that someone wants."""
    every: list[HeldBox | Wanted] = [*held, *wanted]
    by_tensor: dict[int, list[HeldBox | Wanted]] = defaultdict(list)
    for entry in every:
        by_tensor[entry.tensor].append(entry)
    rows = []
    for tensor, entries in by_tensor.items():
        for box, covering in _finest(entries):
            holders: dict[Summand | None, list[int]] = defaultdict(list)
            receivers: dict[tuple[Summand | None, ...], list[int]] = defaultdict(list)
            for entry in covering:
                if isinstance(entry, HeldBox):
                    if entry.rank not in holders[entry.summand]:
                        holders[entry.summand].append(entry.rank)
                elif entry.rank not in receivers[entry.summands]:
                    receivers[entry.summands].append(entry.rank)
            for summands, ranks in receivers.items():
                if not all(summand in holders for summand in summands):
                    raise RoutingError(
                        f"rank {ranks[0]} wants {list(box.ranges)} of tensor {tensor}, "
                        "which no rank holds"
                    )
                by_summand = [holders[summand] for summand in summands]
                rows.append(_Row(tensor, box, by_summand, ranks))
    return rows


def _finest(
    entries: list[HeldBox | Wanted], dimension: int = 0
) -> Iterator[tuple[Box, list[HeldBox | Wanted]]]:
    """The slices that boxes cut each other into, and what covers each: bands, each cut in turn."""
    if dimension == len(entries[0].box.ranges):
        yield Box(()), entries
        return
    ranges = [entry.box.ranges[dimension] for entry in entries]
    edges = sorted(set(itertools.chain.from_iterable(ranges)))
    number = {edge: i for i, edge in enumerate(edges)}
    bands: list[list[HeldBox | Wanted]] = [[] for _ in edges]  # by the edge where they begin
    for entry, (first, last) in zip(entries, ranges, strict=True):
        for i in range(number[first], number[last]):
            bands[i].append(entry)
    for band, covering in zip(itertools.pairwise(edges), bands, strict=False):
        if covering:
            for inner, innermost in _finest(covering, dimension + 1):
                yield Box((band, *inner.ranges)), innermost


def _divided(rows: Iterable[_Row], itemsizes: Sequence[int]) -> list[_Row]:
    """Cuts slices that several could send into parts far smaller than what each will send."""
    rows = list(rows)
    total_bytes = sum(
        math.prod(row.box.shape) * itemsizes[row.tensor] * len(set(row.receivers) - set(holders))
        for row in rows
        for holders in row.holders
    )
    senders = {rank for row in rows for holders in row.holders for rank in holders}
    part_bytes = max(LEAST_PART_BYTES, total_bytes / (PARTS * max(1, len(senders))))
    result: list[_Row] = []
    for row in rows:
        size_bytes = math.prod(row.box.shape) * itemsizes[row.tensor]
        parts = math.ceil(size_bytes / part_bytes) if row.choices > 1 else 1
        result += (replace(row, box=box) for box in _cut(row.box, parts))
    return result


def _cut(box: Box, parts: int) -> Iterable[Box]:
    """Parts of a box, as equal as they can be along its longest dimension; fewer if it is short."""
    if not box.ranges:
        yield box
        return
    dimension = max(range(len(box.shape)), key=box.shape.__getitem__)
    first, size = box.ranges[dimension][0], box.shape[dimension]
    parts = min(parts, size)
    for i in range(parts):
        begin, end = (first + size * turn // parts for turn in (i, i + 1))
        ranges = list(box.ranges)
        ranges[dimension] = begin, end
        yield Box(tuple(ranges))
