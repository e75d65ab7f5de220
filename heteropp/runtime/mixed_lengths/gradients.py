"""Adds the gradients that another plan than home has summed to those of home."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from heteropp.description.plan import Plan
from heteropp.layout.boxes import Box
from heteropp.layout.hspmd.exchange import TensorPiece, exchange
from heteropp.layout.hspmd.routing import HeldBox, Wanted, route
from heteropp.optimizer.flat import FlatBuffers
from heteropp.runtime.mixed_lengths.deliveries import deliveries
from heteropp.runtime.mixed_lengths.parameters import alike


class Gradients:
    """One rank's part in adding the gradients that another plan has summed to home's."""

    def __init__(
        self,
        home: Plan,
        other: Plan,
        rank: int,
        ours: Sequence[Sequence[FlatBuffers]],
        theirs: Sequence[Sequence[FlatBuffers]],
    ) -> None:
        """ours, theirs: home's buffers and the other plan's, by ministage."""
        self.rank, self.ours, self.theirs = rank, ours, theirs
        self.wide = getattr(torch, home.model.wide_dtype)
        found = deliveries(home, other)
        remote = [d for d in found if d.receiver not in d.senders]
        held = {HeldBox(d.tensor, sender, d.whole) for d in remote for sender in d.senders}
        wanted = [Wanted(d.tensor, d.receiver, d.box) for d in remote]
        count = max((d.tensor for d in remote), default=-1) + 1
        itemsizes = [self.wide.itemsize] * count
        self.rounds = route(sorted(held, key=lambda h: (h.tensor, h.rank)), wanted, itemsizes)
        self.sent = [d for d in remote if rank in d.senders]
        skipped = alike(home, other, rank)  # summed there already
        self.added = [
            d for d in found if d.receiver == rank and not (skipped and rank in d.senders)
        ]

    @torch.no_grad()
    def move(self) -> None:
        held = [
            TensorPiece(d.tensor, d.whole, _gradient(self.theirs[d.source], d.name, d.whole))
            for d in self.sent
        ]
        wanted = {
            (d.tensor, d.box): torch.empty(
                d.box.shape, dtype=self.wide, device=self.theirs[0][0].values.device
            )
            for d in self.added
            if self.rank not in d.senders
        }
        exchange(
            self.rounds, self.rank, held, [TensorPiece(t, box, v) for (t, box), v in wanted.items()]
        )
        for d in self.added:  # in one order on all ranks that keep the same
            come = wanted.get((d.tensor, d.box))
            if come is None:
                come = _gradient(self.theirs[d.source], d.name, d.box)
            _gradient(self.ours[d.target], d.name, d.box).add_(come)


def _gradient(flats: Sequence[FlatBuffers], name: str, box: Box) -> Tensor:
    """Returns a slice of a parameter's gradient as a view of the buffer that has it."""
    for flat in flats:
        for piece in flat.layout.boxes():
            if piece.name == name and piece.box.intersect(box) == box:
                assert flat.gradients is not None
                whole = flat.gradients[piece.first : piece.last].view(piece.box.shape)
                return whole[box.within(piece.box)]
    raise KeyError(name)
