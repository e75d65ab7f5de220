"""What one rank packs into its messages of a round, and how it adds up what others send it.

All that one rank sends another in a round is one message. Where everything stands in it is found
once; values may then come and go any number of times.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heteropp.layout.boxes import Box
from heteropp.layout.hspmd.routing import Transfer


@dataclass(frozen=True)
class PieceSlice:
    """A part of one of a rank's pieces."""

    piece: int
    within: tuple[slice, ...]

    def of(self, values: Sequence[Tensor]) -> Tensor:
        return values[self.piece][self.within]


@dataclass(frozen=True)
class Arrival:
    """The bytes of a sender's message in which a slice stands."""

    sender: int
    first: int  # byte
    last: int


@dataclass(frozen=True)
class Sum:
    """A slice that this rank is to have: the sum of what arrives before its own summand, of its
    own, and of what arrives after it, in this order.
    """

    targets: tuple[PieceSlice, ...]
    before: tuple[Arrival, ...]
    own: PieceSlice | None
    after: tuple[Arrival, ...]


class Messages:
    """The messages that one rank sends and receives in one round.

    It is made from the boxes of the rank's pieces alone; `packed` and `add_up` take the values.
    """

    def __init__(
        self,
        transfers: Iterable[Transfer],
        rank: int,
        held: Sequence[tuple[int, Box]],
        wanted: Sequence[tuple[int, Box]],
    ) -> None:
        ours, theirs = _by_tensor(held), _by_tensor(wanted)
        self.sent: dict[int, list[PieceSlice]] = defaultdict(list)  # by receiver
        self.received_bytes: dict[int, int] = defaultdict(int)  # by sender
        self.sums: list[Sum] = []
        concerning = [t for t in transfers if rank == t.receiver or rank in t.senders]
        for transfer in sorted(concerning, key=_itemsize, reverse=True):  # so that all are aligned
            own = None
            if rank in transfer.senders:
                own = next(_slices(ours[transfer.tensor], transfer.box))
                if transfer.receiver != rank:
                    self.sent[transfer.receiver].append(own)
            if transfer.receiver == rank:
                targets = tuple(_slices(theirs[transfer.tensor], transfer.box))
                turn = transfer.senders.index(rank) if own else len(transfer.senders)
                before = tuple(self._arrival(s, transfer) for s in transfer.senders[:turn])
                after = tuple(self._arrival(s, transfer) for s in transfer.senders[turn + 1 :])
                self.sums.append(Sum(targets, before, own, after))

    def packed(self, held: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """The messages that leave, in bytes, by receiver."""
        for receiver, slices in sorted(self.sent.items()):
            parts = [part.of(held) for part in slices]
            message = torch.empty(
                sum(part.nbytes for part in parts), dtype=torch.uint8, device=parts[0].device
            )
            first = 0
            for part in parts:  # one after another: columns would have to be copied for a cat
                last = first + part.nbytes
                message[first:last].view(part.dtype).view(part.shape).copy_(part)
                first = last
            yield receiver, message

    def add_up(
        self, received: Mapping[int, Tensor], held: Sequence[Tensor], wanted: Sequence[Tensor]
    ) -> None:
        """Fills the pieces that this rank wants, which may be those it holds.

        received: by sender; what is summed before this rank's own is summed there.
        """
        for sum_ in self.sums:
            total, *others = (target.of(wanted) for target in sum_.targets)
            before = [_read(received, arrival, total) for arrival in sum_.before]
            if before:
                first, *rest = before
                for summand in rest:
                    first.add_(summand)
            if sum_.own is None:
                total.copy_(first)
            else:
                if held is not wanted:
                    total.copy_(sum_.own.of(held))
                if before:
                    total.add_(first)
            for arrival in sum_.after:
                total.add_(_read(received, arrival, total))
            for other in others:
                other.copy_(total)

    def _arrival(self, sender: int, transfer: Transfer) -> Arrival:
        first = self.received_bytes[sender]
        self.received_bytes[sender] = first + transfer.size_bytes
        return Arrival(sender, first, first + transfer.size_bytes)


def _read(received: Mapping[int, Tensor], arrival: Arrival, like: Tensor) -> Tensor:
    content = received[arrival.sender][arrival.first : arrival.last]
    return content.view(like.dtype).view(like.shape)


def _itemsize(transfer: Transfer) -> int:
    return transfer.size_bytes // math.prod(transfer.box.shape)


def _by_tensor(pieces: Sequence[tuple[int, Box]]) -> dict[int, list[tuple[int, Box]]]:
    result: dict[int, list[tuple[int, Box]]] = defaultdict(list)
    for i, (tensor, box) in enumerate(pieces):
        result[tensor].append((i, box))
    return result


def _slices(pieces: Sequence[tuple[int, Box]], box: Box) -> Iterator[PieceSlice]:
    """A box of a tensor, in each of the pieces that hold it."""
    for i, whole in pieces:
        if box.intersect(whole) == box:
            yield PieceSlice(i, box.within(whole))
