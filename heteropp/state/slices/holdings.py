"""Which slices a rank holds between two steps, and where in its flat buffers they stand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from heteropp.description.plan import Plan, ministage_layers
from heteropp.layout.boxes import Box
from heteropp.layout.flat_buffer import BufferPiece, Layout, layout
from heteropp.state.slices.quantities import Quantity, quantities_of


@dataclass(frozen=True)
class MinistageHoldings:
    """The slices of a ministage that a rank holds."""

    layout: Layout  # of all parameters
    shard: int  # the one of the layout's that the rank keeps

    def pieces(self, whole: bool) -> list[BufferPiece]:
        """Returns the slices of a quantity; their offsets are those of the quantity's buffer."""
        return self._boxes if whole else self._shard_pieces

    def size(self, whole: bool) -> int:
        """Returns the number of elements of a quantity's buffer."""
        return self.layout.size if whole else self.layout.size // self.layout.shards

    @cached_property
    def _boxes(self) -> list[BufferPiece]:
        return self.layout.boxes()

    @cached_property
    def _shard_pieces(self) -> list[BufferPiece]:
        start = self.layout.shard(self.shard).start
        return [
            BufferPiece(piece.name, piece.box, piece.first - start, piece.last - start)
            for piece in self.layout.pieces(self.shard)
        ]


class BufferSlice(NamedTuple):
    """A slice that a rank holds, elements [first, last) of a buffer."""

    ministage: int
    quantity: Quantity
    name: str  # of the parameter, global
    box: Box
    first: int
    last: int


def ministages(plan: Plan, rank: int) -> list[MinistageHoldings]:
    """Returns what a rank of a plan holds, by ministage."""
    p, s, _, tp_index = plan.place(rank)
    stage = plan.pipelines[p].stages[s]
    shards = stage.dp if plan.zero_stage else 1
    turn = stage.peers(tp_index).index(rank)
    return [
        MinistageHoldings(layout(plan.model, layers, stage.tp, tp_index, shards), turn % shards)
        for layers in ministage_layers(plan.pipelines[p], plan.schedule)[s]
    ]


def holdings(plan: Plan, rank: int, quantities: Sequence[Quantity]) -> Iterator[BufferSlice]:
    """Yields the slices of some quantities that a rank of a plan holds.

    A parameter may stand in two of its ministages.
    """
    for k, ministage in enumerate(ministages(plan, rank)):
        for quantity in quantities:
            for piece in ministage.pieces(quantity.whole):
                yield BufferSlice(k, quantity, piece.name, piece.box, piece.first, piece.last)


def state_bytes(plan: Plan, rank: int) -> int:
    """Returns the bytes of all the state that a rank holds."""
    return sum(
        ministage.size(quantity.whole) * quantity.itemsize
        for ministage in ministages(plan, rank)
        for quantity in quantities_of(plan.model)
    )
