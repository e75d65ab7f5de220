"""Adds the gradients that another plan than home has summed to those of home."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from heteropp.description.plan import Plan
from heteropp.layout.flat_buffer import Entry
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
        ours: Sequence[FlatBuffers],
        theirs: Sequence[FlatBuffers],
    ) -> None:
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
            TensorPiece(d.tensor, d.whole, self._gradient(self.theirs[d.source], d.name))
            for d in self.sent
        ]
        wanted = {
            (d.tensor, d.box): torch.empty(
                d.box.shape, dtype=self.wide, device=self.theirs[0].values.device
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
                whole = self._gradient(self.theirs[d.source], d.name)
                come = whole[d.box.within(d.whole)]
            target = self.ours[d.target]
            entry = _entry(target, d.name)
            self._gradient(target, d.name)[d.box.within(entry.box)].add_(come)

    def _gradient(self, flat: FlatBuffers, name: str) -> Tensor:
        assert flat.gradients is not None
        return _of(flat.gradients, _entry(flat, name))


def _entry(flat: FlatBuffers, name: str) -> Entry:
    return next(entry for entry in flat.entries if entry.global_name == name)


def _of(buffer: Tensor, entry: Entry) -> Tensor:
    return buffer[entry.first : entry.last].view(entry.box.shape)
