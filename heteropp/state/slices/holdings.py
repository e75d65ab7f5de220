"""Which slices a rank holds between two steps, and where in its flat buffers they stand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from heteropp.description.hyperparameters import OptimizerName
from heteropp.description.plan import Plan, ministage_layers
from heteropp.description.sections import sections_of
from heteropp.layout.boxes import Box
from heteropp.layout.flat_buffer import BufferPiece, Layout, layout
from heteropp.state.slices.quantities import (
    Quantity,
    StoredName,
    quantities_of,
    quantities_of_matrices,
)


@dataclass(frozen=True)
class FlatHoldings:
    """The slices that a rank holds in one of its flat buffers, and in the optimizer's beside it."""

    layout: Layout
    shard: int  # the one of the layout's that the rank keeps
    optimizer: OptimizerName

    def pieces(self, quantity: Quantity) -> list[BufferPiece]:
        """Returns the slices of a quantity; their offsets are those of the quantity's buffer."""
        if quantity.whole:
            return self._boxes
        return [place for p in self.shard_pieces if (place := self.place(quantity.stored, p))]

    def size(self, quantity: Quantity) -> int:
        """Returns the number of elements of a quantity's buffer."""
        if quantity.whole:
            return self.layout.whole_size
        return self.layout.size // self.layout.shards - self._skipped(quantity.stored)

    def place(self, quantity: StoredName, piece: BufferPiece) -> BufferPiece | None:
        """Returns where a quantity's buffer has a piece of the shard; None: it has not."""
        skipped = self._skipped(quantity)
        if piece.first < skipped:
            return None
        return replace(piece, first=piece.first - skipped, last=piece.last - skipped)

    def _skipped(self, quantity: StoredName) -> int:
        """Returns how many of the shard's first elements a quantity's buffer leaves out."""
        if quantity in quantities_of_matrices(self.optimizer):
            return 0
        return self.layout.matrices_in(self.layout.shard(self.shard))

    @cached_property
    def _boxes(self) -> list[BufferPiece]:
        return self.layout.boxes()

    @cached_property
    def shard_pieces(self) -> list[BufferPiece]:
        """The slices of the rank's shard of what trains; their offsets are those of the shard."""
        start = self.layout.shard(self.shard).start
        return [
            BufferPiece(piece.name, piece.box, piece.first - start, piece.last - start)
            for piece in self.layout.pieces(self.shard)
        ]

    @cached_property
    def frozen_pieces(self) -> list[BufferPiece]:
        """The slices of what is frozen for which the rank's shard answers."""
        return self.layout.frozen_pieces(self.shard)


class BufferSlice(NamedTuple):
    """A slice that a rank holds, elements [first, last) of a buffer."""

    flat: int  # which of the rank's flat buffers it is of
    quantity: Quantity
    name: str  # of the parameter, global
    box: Box
    first: int
    last: int


def flat_holdings(plan: Plan, rank: int) -> list[FlatHoldings]:
    """Returns what a rank of a plan holds, by flat buffer.

    A ministage has one, or with expert parallelism another one behind it.
    """
    p, s, _, tp_index = plan.place(rank)
    stage, zero = plan.pipelines[p].stages[s], plan.zero_stage
    return [
        FlatHoldings(
            layout(plan.model, layers, stage.tp, tp_index, part.shards(zero), part.experts),
            part.peers[tp_index].index(rank) % part.shards(zero),
            plan.optimizer,
        )
        for layers in ministage_layers(plan.pipelines[p], plan.schedule)[s]
        for part in sections_of(stage, tp_index, rank)
    ]


def holdings(plan: Plan, rank: int, quantities: Sequence[Quantity]) -> Iterator[BufferSlice]:
    """Yields the slices of some quantities that a rank of a plan holds.

    A parameter may stand in two of its ministages.
    """
    for k, held in enumerate(flat_holdings(plan, rank)):
        for quantity in quantities:
            for piece in held.pieces(quantity):
                yield BufferSlice(k, quantity, piece.name, piece.box, piece.first, piece.last)


def state_bytes(plan: Plan, rank: int) -> int:
    """Returns the bytes of all the state that a rank holds."""
    return sum(
        held.size(quantity) * quantity.itemsize
        for held in flat_holdings(plan, rank)
        for quantity in quantities_of(plan.model)
    )
