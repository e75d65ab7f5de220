"""Sums a ministage's gradients over the other places where its parameters stand (see copies.py).

Every rank sends what it keeps to those who want it, and adds what it is sent in the order of the
places: all of them have the same sums, bit for bit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from heteropp.boxes import Box
from heteropp.copies import Delivery, Part, deliveries, holders
from heteropp.layout import Piece
from heteropp.plan import Plan
from heteropp.training.step.zero import FlatParameters

FIRST_TAG = 1 << 16  # above those of boundary tensors
MINISTAGES = 1 << 10  # more than any stage has


@dataclass(frozen=True)
class Slice:
    """A part of a rank's shard of gradients."""

    name: str  # of the parameter
    place: slice  # of the shard, where a piece with it stands
    piece_shape: tuple[int, ...]
    within: tuple[slice, ...]  # the piece
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def of(self, shard: Tensor) -> Tensor:
        return shard[self.place].view(self.piece_shape)[self.within]


@dataclass(frozen=True)
class Message:
    """What goes between two ranks, slice after slice."""

    other: Part
    peer: int
    tag: int
    slices: list[Slice]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.slices)

    def unpacked(self, content: Tensor) -> Iterator[tuple[Slice, Tensor]]:
        parts = content.split([part.size for part in self.slices])
        return zip(self.slices, parts, strict=True)


class Sums:
    """Of one ministage of a rank."""

    def __init__(self, plan: Plan, rank: int, part: Part, flat: FlatParameters) -> None:
        self.rank, self.part, self.flat = rank, part, flat
        self.pieces: dict[str, list[Piece]] = defaultdict(list)  # of the shard, by name
        for piece in flat.pieces:
            self.pieces[piece.name].append(piece)
        everywhere = holders(plan)
        self.places = {name: everywhere[name] for name in {e.global_name for e in flat.entries}}
        others = sorted({place for places in self.places.values() for place in places} - {part})
        self.sends = [
            message
            for other in others
            for message in self._messages(other, deliveries(plan, part, other), sends=True)
        ]
        self.receives = [
            message
            for other in others
            for message in self._messages(other, deliveries(plan, other, part), sends=False)
        ]
        self.sending: list[tuple[dist.Work, Tensor]] = []
        self.receiving: list[tuple[Message, Tensor, dist.Work | None]] = []

    def speaks_for(self, name: str) -> bool:
        """Whether this place, of all that hold a parameter, is the one that counts."""
        return self.places[name][0] == self.part

    def start(self, to_self: dict[int, Tensor]) -> None:
        """Once the replicas' sums are there: sends them, and posts the receives.

        to_self: messages between ministages of this rank, by tag.
        """
        shard = self.flat.reduced()
        for message in self.sends:
            content = torch.cat([part.of(shard).reshape(-1) for part in message.slices])
            if message.peer == self.rank:
                to_self[message.tag] = content
                continue
            work = dist.isend(content, message.peer, tag=message.tag)
            assert work is not None
            self.sending.append((work, content))
        for message in self.receives:
            if message.peer == self.rank:
                continue
            content = shard.new_empty(message.size)
            work = dist.irecv(content, message.peer, tag=message.tag)
            self.receiving.append((message, content, work))

    def finish(self, to_self: dict[int, Tensor]) -> None:
        """Adds what comes; every place's `start` has been called."""
        for message in self.receives:
            if message.peer == self.rank:
                self.receiving.append((message, to_self[message.tag], None))
        for _, _, work in self.receiving:
            if work is not None:
                work.wait()
        self._add([(message, content) for message, content, _ in self.receiving])
        for sent, _ in self.sending:
            sent.wait()
        self.receiving, self.sending = [], []

    def _add(self, received: list[tuple[Message, Tensor]]) -> None:
        """Place after place; those that come before ours by two and more are summed apart."""
        shard = self.flat.reduced()
        own = {name: places.index(self.part) for name, places in self.places.items()}
        before = torch.empty_like(shard) if max(own.values()) > 1 else shard
        for message, content in sorted(received, key=lambda pair: pair[0].other):
            for part, values in message.unpacked(content):
                place = self.places[part.name].index(message.other)
                mine, values = part.of(shard), values.view(part.shape)
                if own[part.name] < 2 or place > own[part.name]:
                    mine.add_(values)
                    continue
                so_far = part.of(before)
                so_far.add_(values) if place else so_far.copy_(values)
                if place == own[part.name] - 1:
                    mine.add_(so_far)

    def _messages(self, other: Part, wanted: list[Delivery], *, sends: bool) -> Iterator[Message]:
        """This rank's, one for each peer."""
        pairs = (self.part[2], other[2]) if sends else (other[2], self.part[2])
        tag = FIRST_TAG + pairs[0] * MINISTAGES + pairs[1]
        by_peer: dict[int, list[Slice]] = defaultdict(list)
        for delivery in wanted:
            here, peer = delivery.source, delivery.destination
            if not sends:
                here, peer = peer, here
            if here == self.rank:
                by_peer[peer].append(self._slice(delivery.name, delivery.box))
        for peer, slices in sorted(by_peer.items()):
            yield Message(other, peer, tag, slices)

    def _slice(self, name: str, box: Box) -> Slice:
        piece = next(piece for piece in self.pieces[name] if box.intersect(piece.box) == box)
        start = self.flat.shard.start
        place = slice(piece.first - start, piece.last - start)
        return Slice(name, place, piece.box.shape, box.within(piece.box), box.shape)
