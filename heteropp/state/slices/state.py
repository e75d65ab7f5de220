"""What a rank adds to a checkpoint or a snapshot of the state, and takes from one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from heteropp.layout.boxes import Box
from heteropp.layout.flat_buffer import BufferPiece
from heteropp.state.slices.block_files import HeldSlice, Tensors
from heteropp.state.slices.buffers import tensors, view
from heteropp.state.slices.holdings import MinistageHoldings
from heteropp.state.slices.parameter_slice import ParameterSlice, Shard, block_of
from heteropp.state.slices.quantities import STORED, StoredName, quantities_of
from heteropp.state.slices.scalars import Scalars

if TYPE_CHECKING:  # what a rank trains with is handed in
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
        self.ministages = [
            MinistageHoldings(
                flat.layout, flat.replica % flat.layout.shards, update.hyperparameters.optimizer
            )
            for flat in update.flats
        ]

    def held(self) -> Iterator[HeldSlice]:
        """Yields the slices that this rank holds, with the optimizer's state of each.

        Those that another rank speaks for are among them: each element of the model is owned by
        one rank.
        """
        counted = zip(self.update.sums, self.update.sections, strict=True)
        sums_of = [(sums, flats[0]) for sums, flats in counted for _ in flats]
        parts = zip(self.update.each(), sums_of, self.ministages, strict=True)
        for flat, (sums, first), ministage in parts:
            everything = (*flat.entries, *flat.layout.frozen)
            entries = {entry.global_name: entry for entry in everything}
            tp, own = flat.module.group, tensors(flat)
            # of what all groups hold, so that experts beside it are in the same file
            parts_of_block = first.layout.shards
            shard = Shard(tp.index, tp.size, first.replica % parts_of_block, parts_of_block)
            stored: list[tuple[BufferPiece, Tensors]] = [
                (
                    piece,
                    {
                        what: view(own[what], place)
                        for what in STORED
                        if (place := ministage.place(what, piece))
                    },
                )
                for piece in ministage.shard_pieces
            ]
            stored += [
                (piece, {"value": view(own["parameter"], piece)})
                for piece in ministage.frozen_pieces
            ]
            for piece, quantities in stored:
                owned = flat.speaks_for(entries[piece.name]) and sums.speaks_for(piece.name)
                yield HeldSlice(shard, ParameterSlice(piece.name, piece.box), quantities, owned)

    def wanted(self) -> set[tuple[StoredName, ParameterSlice]]:
        """Returns the quantities and slices that `restore` reads, but for those within others."""
        return {
            (quantity.stored, ParameterSlice(piece.name, piece.box))
            for quantity in self.quantities
            if quantity.name != "value"  # within those of the parameter
            for ministage in self.ministages
            for piece in ministage.pieces(quantity)
        }

    def blocks(self) -> dict[str, set[ParameterSlice]]:
        """Returns the slices that this rank holds of each block of the model."""
        found: dict[str, set[ParameterSlice]] = defaultdict(set)
        for ministage in self.ministages:
            for piece in (*ministage.shard_pieces, *ministage.frozen_pieces):
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
        for flat, ministage in zip(self.update.each(), self.ministages, strict=True):
            own = tensors(flat)
            for quantity in self.quantities:
                for piece in ministage.pieces(quantity):
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
