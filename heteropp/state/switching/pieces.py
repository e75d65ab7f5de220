"""A rank's slices as what is exchanged."""

from __future__ import annotations

from heteropp.description.plan import Plan
from heteropp.layout.hspmd.exchange import TensorPiece
from heteropp.state.slices.buffers import Buffers, view
from heteropp.state.slices.holdings import holdings
from heteropp.state.switching.table import Table


def pieces(plan: Plan, rank: int, table: Table, buffers: Buffers) -> list[TensorPiece]:
    """Returns a rank's slices as views of its buffers, numbered as in the table."""
    return [
        TensorPiece(
            table.tensors[held.name, held.quantity.name],
            held.box,
            view(buffers[held.flat, held.quantity.name], held),
        )
        for held in holdings(plan, rank, table.quantities)
    ]
