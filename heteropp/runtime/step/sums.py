"""Sums a ministage's gradients over the other places of the plan where its parameters stand.

optimizer/replicated_gradients.py says which those are. Every rank sends what it keeps to those who
want it, and adds what it is sent in the order of the places: all of them have the same sums, bit
for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from heteropp.description.plan import Plan
from heteropp.layout.hspmd.messages import Messages
from heteropp.optimizer.replicated_gradients import (
    MINISTAGES,
    Part,
    holders,
    numbers,
    seat,
    shared,
    sums,
)
from heteropp.optimizer.zero import FlatParameters

FIRST_TAG = 1 << 16  # above those of boundary tensors

ToSelf = dict[tuple[int, int], Tensor]  # messages between ministages of one rank, by seats


class Sums:
    """Sums the gradients of one ministage of a rank, which its flat buffers hold together."""

    def __init__(self, plan: Plan, rank: int, part: Part, flats: Sequence[FlatParameters]) -> None:
        self.rank, self.seat, self.flats = rank, seat(rank, part[2]), flats
        ours = {places: names for places, names in shared(plan).items() if part in places}
        self.counted = {name for name, places in holders(plan).items() if places[0] == part}
        everywhere = {name for names in ours.values() for name in names}
        self.pieces = [
            (flat, piece) for flat in flats for piece in flat.pieces if piece.name in everywhere
        ]
        number = numbers(plan.model)
        named = [(number[piece.name], piece.box) for _, piece in self.pieces]
        transfers = [t for places in ours for t in sums(plan, places, flats[0].wide.itemsize)]
        self.messages = Messages(transfers, self.seat, named, named)
        self.sending: list[tuple[dist.Work, Tensor]] = []
        self.receiving: list[dist.Work] = []
        self.received: dict[int, Tensor] = {}  # by seat

    def speaks_for(self, name: str) -> bool:
        """Whether this place, of all that hold a parameter, is the one that counts."""
        return name in self.counted

    def start(self, to_self: ToSelf) -> None:
        """Waits for the replicas' sums, sends them to the other places, and posts the receives."""
        gradients = self._gradients()
        for other, message in self.messages.packed(gradients):
            peer, tag = other // MINISTAGES, _tag(self.seat, other)
            if peer == self.rank:
                to_self[self.seat, other] = message
                continue
            work = dist.isend(message, peer, tag=tag)
            assert work is not None
            self.sending.append((work, message))
        for other, size_bytes in self.messages.received_bytes.items():
            peer, tag = other // MINISTAGES, _tag(other, self.seat)
            if peer == self.rank:
                continue
            message = torch.empty(size_bytes, dtype=torch.uint8, device=gradients[0].device)
            work = dist.irecv(message, peer, tag=tag)
            assert work is not None
            self.receiving.append(work)
            self.received[other] = message

    def finish(self, to_self: ToSelf) -> None:
        """Adds what the other places send; the rank's ministages must all have been started."""
        for (other, own), message in to_self.items():
            if own == self.seat:
                self.received[other] = message
        for work in self.receiving:
            work.wait()
        gradients = self._gradients()
        self.messages.add_up(self.received, gradients, gradients)
        for work, _ in self.sending:
            work.wait()
        self.sending, self.receiving, self.received = [], [], {}

    def _gradients(self) -> list[Tensor]:
        """Returns the reduced gradients of the pieces, as views of this rank's shards."""
        reduced = {id(flat): flat.reduced() for flat in self.flats}
        return [
            reduced[id(flat)][piece.first - flat.shard.start : piece.last - flat.shard.start].view(
                piece.box.shape
            )
            for flat, piece in self.pieces
        ]


def _tag(source: int, destination: int) -> int:
    return FIRST_TAG + source % MINISTAGES * MINISTAGES + destination % MINISTAGES
