"""Boundary tensors between a ministage and its neighbour: received ahead, sent behind.

Which rows go from whom to whom is the plan's resharding strategy (layout/resharding.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from heteropp.description.plan import Plan, Resharding, Stage
from heteropp.layout.boxes import Box
from heteropp.layout.resharding import (
    SENDS_UNDER_WAY,
    common_multiple,
    group_boxes,
    held_boxes,
    messages,
    received_boxes,
)
from heteropp.models.parallel.tensor_parallel import ProcessGroup
from heteropp.runtime.ranks.transport import Coordinates


@dataclass(frozen=True)
class BoundaryMessage:
    """One message of a boundary tensor: the peer, and its rows of the tensor held here."""

    peer: int
    rows: slice


class Inbox:
    """The boundary tensors that come from one neighbour, one a micro-batch, in order.

    Those of slices are as of micro-batches with shorter sequences, which come in turn. Receives are
    posted ahead of their turn, at most as many at a time as `begin` is given.
    """

    def __init__(
        self,
        plan: Plan,
        place: Coordinates,
        sender: Stage,
        lengths: Sequence[int],
        tag: int,
        device: torch.device,
        dtype: torch.dtype,
        width: int,
    ) -> None:
        """lengths: of the sequences in each of some tensors, which come over and over; width: the
        features of a row.
        """
        own = common_multiple(place.stage, sender)[0]
        self.turns: list[tuple[int, list[BoundaryMessage]]] = []  # rows, and what fills them
        for length in lengths:
            found = messages(sender, place.stage, length, plan.resharding)
            held = [
                _sent_boxes(own, replica, place, plan, length) for replica in _turns(place, own)
            ]
            ours = [(m.source, m.box) for m in found if m.destination == place.rank]
            rows = [sum(box.size for box in boxes) for boxes in held]
            self.turns += zip(rows, _parts(held, ours), strict=True)
        self.width, self.tag, self.device, self.dtype = width, tag, device, dtype
        self.posted: deque[tuple[Tensor, list[dist.Work]]] = deque()
        self.micro_batches = self.ahead = self.next = 0

    def begin(self, micro_batches: int, ahead: int) -> None:
        """Starts a step in which this many tensors come, so many of them ahead of their turn."""
        assert not self.posted
        self.micro_batches, self.ahead, self.next = micro_batches, ahead, 0
        self._post()

    def take(self) -> Tensor:
        """Waits for this rank's part of the next tensor, which gather_boundary makes whole.

        The part is [rows / tp, hidden] where the resharding ends in an all-gather.
        """
        piece, works = self.posted.popleft()
        self._post()
        for work in works:
            work.wait()
        return piece

    def _post(self) -> None:
        while self.next < self.micro_batches and len(self.posted) < self.ahead:
            rows, parts = self.turns[self.next % len(self.turns)]
            piece = torch.empty(rows, self.width, device=self.device, dtype=self.dtype)
            works = []
            for part in parts:
                work = dist.irecv(piece[part.rows], part.peer, tag=self.tag)
                assert work is not None
                works.append(work)
            self.posted.append((piece, works))
            self.next += 1


class Outbox:
    """The boundary tensors that go to one neighbour; each is held until its peers have it.

    At most SENDS_UNDER_WAY are: the host, which runs ahead of its chip, would hold more and more.
    """

    def __init__(
        self, plan: Plan, place: Coordinates, receiver: Stage, lengths: Sequence[int], tag: int
    ) -> None:
        """lengths: of the sequences in each of some tensors, which go over and over."""
        own = common_multiple(place.stage, receiver)[0]
        indices = place.cp_index, place.tp_index
        self.turns: list[list[BoundaryMessage]] = []
        for length in lengths:
            found = messages(place.stage, receiver, length, plan.resharding)
            held = [held_boxes(own, replica, *indices, length) for replica in _turns(place, own)]
            ours = [(m.destination, m.box) for m in found if m.source == place.rank]
            self.turns += _parts(held, ours)
        self.tag, self.overlap = tag, plan.overlap
        self.next = 0
        self.under_way: deque[tuple[list[dist.Work], Tensor]] = deque()

    def send(self, tensor: Tensor) -> None:
        """Starts sending a [rows, hidden] tensor, which must not change until it has left.

        In a plan without overlap it waits until then, and the chip does nothing else.
        """
        while len(self.under_way) >= SENDS_UNDER_WAY or (
            self.under_way and all(work.is_completed() for work in self.under_way[0][0])
        ):
            self._finish()
        works = []
        for part in self.turns[self.next % len(self.turns)]:
            work = dist.isend(tensor[part.rows], part.peer, tag=self.tag)
            assert work is not None
            works.append(work)
        self.under_way.append((works, tensor))
        self.next += 1
        if not self.overlap:
            self.finish()

    def finish(self) -> None:
        """Waits until everything has left."""
        while self.under_way:
            self._finish()

    def _finish(self) -> None:
        works, _ = self.under_way.popleft()
        for work in works:
            work.wait()


def gather_boundary(piece: Tensor, group: ProcessGroup, strategy: Resharding) -> Tensor:
    """Returns all rows of a boundary tensor, [rows, hidden], on every rank of a replica.

    piece: what this rank was sent of it.
    """
    if strategy == "all-gather":
        whole = piece.new_empty((piece.shape[0] * group.size, *piece.shape[1:]))
        group.all_gather(whole, piece)
        return whole
    if strategy == "broadcast":
        dist.broadcast(piece, group=group.group, group_src=0)
    return piece


def _turns(place: Coordinates, multiple: Stage) -> range:
    """Returns the common multiple's replicas that a rank acts as, one micro-batch after another."""
    return range(place.replica_index, multiple.dp, place.stage.dp)


def _parts(
    held: Sequence[Sequence[Box]], ours: Sequence[tuple[int, Box]]
) -> list[list[BoundaryMessage]]:
    """Returns, for each turn, the messages that overlap the boxes held here in that turn.

    held: by turn, the boxes whose rows stand one after the other in the tensor held here. ours: the
    peer and box of each message that this rank sends or receives.
    """
    return [
        [
            BoundaryMessage(peer, slice(first, first + box.size))
            for peer, box in ours
            for first in _first_rows(boxes, box)
        ]
        for boxes in held
    ]


def _first_rows(boxes: Sequence[Box], message: Box) -> Iterator[int]:
    """Yields the row where a message begins in a tensor of some boxes, if it lies in one."""
    before = 0
    for box in boxes:
        if box.intersect(message):
            yield before + _start(message) - _start(box)
        before += box.size


def _start(box: Box) -> int:
    return box.ranges[0][0]


def _sent_boxes(
    stage: Stage, replica: int, place: Coordinates, plan: Plan, length: int
) -> list[Box]:
    """Returns the boxes that a rank makes room for.

    They are what the rank is sent; one that is sent nothing gets all its group's by broadcast.
    """
    indices = place.cp_index, place.tp_index
    sent = received_boxes(stage, replica, *indices, length, plan.resharding)
    return sent or group_boxes(stage, replica, place.cp_index, length)
