"""Adds the gradients that another plan than home has summed to those of home."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from heteropp.description.plan import Plan
from heteropp.layout.boxes import Box
from heteropp.layout.flat_buffer import BufferPiece
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
        self.rank, self.device = rank, theirs[0][0].values.device
        self.wide = getattr(torch, home.model.wide_dtype)
        found = deliveries(home, other)
        remote = [d for d in found if d.receiver not in d.senders]
        held = {HeldBox(d.tensor, sender, d.whole) for d in remote for sender in d.senders}
        wanted = [Wanted(d.tensor, d.receiver, d.box) for d in remote]
        count = max((d.tensor for d in remote), default=-1) + 1
        itemsizes = [self.wide.itemsize] * count
        self.rounds = route(sorted(held, key=lambda h: (h.tensor, h.rank)), wanted, itemsizes)
        skipped = alike(home, other, rank)  # summed there already
        at_home, away = ([_slices(flats) for flats in each] for each in (ours, theirs))
        self.sent = [
            (d, _find(away[d.source], d.name, d.whole)) for d in remote if rank in d.senders
        ]
        # where each is added, and whence it is taken; None: it comes from others
        self.added = [
            (
                d,
                _find(at_home[d.target], d.name, d.box),
                _find(away[d.source], d.name, d.box) if rank in d.senders else None,
            )
            for d in found
            if d.receiver == rank and not (skipped and rank in d.senders)
        ]

    @torch.no_grad()
    def move(self) -> None:
        held = [TensorPiece(d.tensor, d.whole, slice_.gradient()) for d, slice_ in self.sent]
        wanted = {
            (d.tensor, d.box): torch.empty(d.box.shape, dtype=self.wide, device=self.device)
            for d, _, own in self.added
            if own is None
        }
        exchange(
            self.rounds, self.rank, held, [TensorPiece(t, box, v) for (t, box), v in wanted.items()]
        )
        for d, to, own in self.added:  # in one order on all ranks that keep the same
            to.gradient().add_(wanted[d.tensor, d.box] if own is None else own.gradient())


@dataclass(frozen=True)
class _Slice:
    """A slice of a parameter, and the piece of a flat buffer that has it."""

    box: Box
    piece: BufferPiece
    flat: FlatBuffers

    def gradient(self) -> Tensor:
        """Returns the slice's gradient as a view of the buffer of this step."""
        assert self.flat.gradients is not None
        values = self.flat.gradients[self.piece.first : self.piece.last]
        return values.view(self.piece.box.shape)[self.box.within(self.piece.box)]


def _slices(flats: Sequence[FlatBuffers]) -> dict[str, list[_Slice]]:
    """Returns what a ministage's buffers have of each parameter: many pieces of packed experts."""
    found: dict[str, list[_Slice]] = defaultdict(list)
    for flat in flats:
        for piece in flat.layout.boxes():
            found[piece.name].append(_Slice(piece.box, piece, flat))
    return found


def _find(slices: Mapping[str, Sequence[_Slice]], name: str, box: Box) -> _Slice:
    whole = next(each for each in slices[name] if each.box.intersect(box) == box)
    return replace(whole, box=box)
