"""What a rank adds to a checkpoint or a snapshot of the state, and takes from one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from heteropp.layout.boxes import Box
from heteropp.layout.flat_buffer import BufferPiece
from heteropp.optimizer.zero import FlatParameters
from heteropp.state.checkpoint.manifest import ParameterSlice, Scalars
from heteropp.state.checkpoint.reader import Quantity
from heteropp.state.checkpoint.writer import Tensors, block_of
from heteropp.state.recovery.manifest import Shard

if TYPE_CHECKING:  # what a rank trains with is handed in
    from heteropp.runtime.step.guard import Guard
    from heteropp.runtime.step.update import Update


class HeldSlice(NamedTuple):
    """A slice of a parameter that a rank holds."""

    shard: Shard  # of its block, that the rank holds
    slice: ParameterSlice
    tensors: Tensors
    owned: bool  # by this rank: of all that hold the slice, it is the one that answers for it


class Source(Protocol):
    """Where a state is taken from."""

    def read(self, quantity: Quantity, name: str, box: Box) -> Tensor:
        """Returns a box of a quantity of a parameter, on the host."""


class State:
    def __init__(self, update: Update, guard: Guard) -> None:
        self.update, self.guard = update, guard

    def slices(self) -> Iterator[tuple[ParameterSlice, Tensors]]:
        """Yields the slices that this rank speaks for: each element of the model has one rank."""
        return ((held.slice, held.tensors) for held in self.held() if held.owned)

    def held(self) -> Iterator[HeldSlice]:
        """Yields the slices that this rank holds, with the optimizer's state of each.

        Those that another rank speaks for are among them.
        """
        for flat, sums in zip(self.update.each(), self.update.sums, strict=True):
            entries = {entry.global_name: entry for entry in flat.entries}
            tp, shards = flat.module.group, flat.layout.shards
            shard = Shard(tp.index, tp.size, flat.replica % shards, shards)
            for piece in flat.pieces:
                tensors = {what: _of(flat, whole, piece) for what, whole in _shard(flat).items()}
                owned = flat.counts_in_norm(entries[piece.name]) and sums.counts_in_norm(piece.name)
                yield HeldSlice(shard, ParameterSlice(piece.name, piece.box), tensors, owned)

    def wanted(self) -> set[tuple[Quantity, ParameterSlice]]:
        """Returns the quantities and slices that `restore` reads."""
        found: set[tuple[Quantity, ParameterSlice]] = set()
        for flat in self.update.flats:
            found |= {
                ("value", ParameterSlice(held.name, held.box)) for held in flat.layout.boxes()
            }
            for piece in flat.pieces:  # whose values are among those
                kept = _shard(flat).keys() - {"value"}
                found |= {(what, ParameterSlice(piece.name, piece.box)) for what in kept}
        return found

    def blocks(self) -> dict[str, set[ParameterSlice]]:
        """Returns the slices that this rank holds of each block of the model."""
        found: dict[str, set[ParameterSlice]] = defaultdict(set)
        for flat in self.update.flats:
            for piece in flat.pieces:
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
        for flat in self.update.each():
            for held in flat.layout.boxes():
                value = source.read("value", held.name, held.box)
                flat.values[held.first : held.last].copy_(value.reshape(-1))
            for piece in flat.pieces:
                for what, whole in _shard(flat).items():
                    _of(flat, whole, piece).copy_(source.read(what, piece.name, piece.box))
        self.take(scalars)

    def take(self, scalars: Scalars) -> None:
        """Takes over the scalars, which a step depends on besides tensors."""
        for flat in self.update.flats:
            flat.optimizer.steps.fill_(scalars.updates)
        if self.update.scaler and scalars.loss_scale is not None:
            self.update.scaler.scale = scalars.loss_scale
            self.update.scaler.good_steps = scalars.good_steps
        self.guard.restore(scalars)


def _shard(flat: FlatParameters) -> dict[Quantity, Tensor]:
    """Returns the optimizer's tensors, each of the length of the shard."""
    optimizer = flat.optimizer
    return {
        "value": flat.master,
        "average": optimizer.average,
        "average_square": optimizer.average_square,
    }


def _of(flat: FlatParameters, shard: Tensor, piece: BufferPiece) -> Tensor:
    start = flat.shard.start
    return shard[piece.first - start : piece.last - start].view(piece.box.shape)
