"""What a rank adds to a checkpoint or a snapshot of the state, and takes from one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from heteropp.layout.boxes import Box
from heteropp.layout.flat_buffer import BufferPiece
from heteropp.state.slices.block_files import HeldSlice, Tensors
from heteropp.state.slices.buffers import tensors, view
from heteropp.state.slices.holdings import FlatHoldings
from heteropp.state.slices.parameter_slice import ParameterSlice, Shard, block_of
from heteropp.state.slices.quantities import STORED, StoredName, quantities_of
from heteropp.state.slices.scalars import Scalars

if TYPE_CHECKING:  # what a rank trains with is handed in
    from heteropp.optimizer.zero import FlatParameters
    from heteropp.runtime.step.guard import Guard
    from heteropp.runtime.step.update import Update


class Source(Protocol):
    """Where a state is taken from."""

    def read(self, quantity: StoredName, name: str, box: Box) -> Tensor:
        """Returns a box of a quantity of a parameter, on the host."""


class State:
    def __init__(self, update: Update, guard: Guard) -> None:
        self.update, self.guard = update, guard
        self.quantities = quantities_of(update.flats[0].module.model)
        self.holdings = [  # by flat buffer
            FlatHoldings(
                flat.layout, flat.replica % flat.layout.shards, update.hyperparameters.optimizer
            )
            for flat in update.flats
        ]

    def held(self) -> Iterator[HeldSlice]:
        """Yields the slices that this rank holds, with the optimizer's state of each.

        Those that another rank speaks for are among them: each element of the model is owned by
        one rank.
        """
        flats = zip(self.update.each(), self.holdings, strict=True)
        for sections, sums in zip(self.update.sections, self.update.sums, strict=True):
            shard = _shard(sections[0])  # experts beside it are in the same file
            for flat, holdings in islice(flats, len(sections)):
                entries = {e.global_name: e for e in (*flat.entries, *flat.layout.frozen)}
                for piece, quantities in _stored(flat, holdings):
                    owned = flat.speaks_for(entries[piece.name]) and sums.speaks_for(piece.name)
                    yield HeldSlice(shard, ParameterSlice(piece.name, piece.box), quantities, owned)

    def wanted(self) -> set[tuple[StoredName, ParameterSlice]]:
        """Returns the quantities and slices that `restore` reads, but for those within others."""
        return {
            (quantity.stored, ParameterSlice(piece.name, piece.box))
            for quantity in self.quantities
            if quantity.name != "value"  # within those of the parameter
            for held in self.holdings
            for piece in held.pieces(quantity)
        }

    def blocks(self) -> dict[str, set[ParameterSlice]]:
        """Returns the slices that this rank holds of each block of the model."""
        found: dict[str, set[ParameterSlice]] = defaultdict(set)
        for held in self.holdings:
            for piece in (*held.shard_pieces, *held.frozen_pieces):
                found[block_of(piece.name)].add(ParameterSlice(piece.name, piece.box))
        return dict(found)

    def scalars(self) -> Scalars:
        guard, scaler = self.guard, self.update.scaler
        return Scalars(
            updates=int(self.update.flats[0].optimizer.steps),
            losses=tuple(guard.losses),
            gradient_norms=tuple(guard.gradient_norms),
            skipped_in_a_row=guard.skipped_in_a_row,
            loss_scale=scaler.scale if scaler else None,
            good_steps=scaler.good_steps if scaler else 0,
        )

    @torch.no_grad()
    def restore(self, source: Source, scalars: Scalars) -> None:
        """Fills this rank's parameters and optimizer, however they were cut when they were kept.

        Raises CheckpointError where the source lacks some of them.
        """
        for flat, held in zip(self.update.each(), self.holdings, strict=True):
            own = tensors(flat)
            for quantity in self.quantities:
                for piece in held.pieces(quantity):
                    found = source.read(quantity.stored, piece.name, piece.box)
                    view(own[quantity.name], piece).copy_(found)
        self.take(scalars)

    def take(self, scalars: Scalars) -> None:
        """Takes over the scalars, which a step depends on besides tensors."""
        for flat in self.update.flats:
            flat.optimizer.steps.fill_(scalars.updates)
        if self.update.scaler and scalars.loss_scale is not None:
            self.update.scaler.scale = scalars.loss_scale
            self.update.scaler.good_steps = scalars.good_steps
        self.guard.restore(scalars)


def _shard(flat: FlatParameters) -> Shard:
    tp, shards = flat.module.group, flat.layout.shards
    return Shard(tp.index, tp.size, flat.replica % shards, shards)


def _stored(flat: FlatParameters, holdings: FlatHoldings) -> Iterator[tuple[BufferPiece, Tensors]]:
    """Yields the slices of a flat buffer in this rank's shard, with all that is kept of each."""
    own = tensors(flat)
    for piece in holdings.shard_pieces:
        places = {what: place for what in STORED if (place := holdings.place(what, piece))}
        yield piece, {what: view(own[what], place) for what, place in places.items()}
    for piece in holdings.frozen_pieces:
        yield piece, {"value": view(own["parameter"], piece)}
