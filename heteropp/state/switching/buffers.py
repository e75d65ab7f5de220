"""A rank's state in flat buffers: those of the old plan's training, and fresh ones for the new."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from heteropp.description.plan import Plan
from heteropp.layout.hspmd.exchange import TensorPiece
from heteropp.optimizer.zero import FlatParameters
from heteropp.state.switching.table import Quantity, Table, buffer_sizes, holdings

if TYPE_CHECKING:  # what a rank trains with is handed in
    from heteropp.runtime.step.update import Update

Buffers = dict[tuple[int, str], Tensor]  # by ministage and quantity


def of_training(update: Update) -> Buffers:
    """Returns the running training's own tensors.

    Where some of them come and go (Zorse's offload), it returns copies in host memory.
    """
    copies = update.load_parameters is not None
    return {
        (k, name): tensor.to("cpu", copy=True) if copies else tensor
        for k, flat in enumerate(update.each())
        for name, tensor in _tensors(flat).items()
    }


def to_host(buffers: Buffers) -> None:
    """Moves one buffer after another to host memory, which makes room on the chip."""
    for key in buffers:
        buffers[key] = buffers[key].cpu()


def fresh(plan: Plan, rank: int, quantities: Sequence[Quantity], device: torch.device) -> Buffers:
    sizes = buffer_sizes(plan, rank, quantities)
    dtypes = {quantity.name: getattr(torch, quantity.dtype) for quantity in quantities}
    return {
        (k, name): torch.zeros(size, dtype=dtypes[name], device=device)
        for (k, name), size in sizes.items()
    }


@torch.no_grad()
def fill(update: Update, buffers: Buffers) -> None:
    """Copies a training's state from buffers of the same plan and rank, and lets go of them."""
    for k, flat in enumerate(update.each()):
        for name, tensor in _tensors(flat).items():
            tensor.copy_(buffers.pop((k, name)))


def pieces(plan: Plan, rank: int, table: Table, buffers: Buffers) -> list[TensorPiece]:
    """Returns a rank's slices as views of its buffers, numbered as in the table."""
    return [
        TensorPiece(
            table.tensors[h.name, h.quantity.name],
            h.box,
            buffers[h.ministage, h.quantity.name][h.first : h.last].view(h.box.shape),
        )
        for h in holdings(plan, rank, table.quantities)
    ]


def _tensors(flat: FlatParameters) -> dict[str, Tensor]:
    """Returns the tensors of a ministage's state, by quantity."""
    tensors = {
        "parameter": flat.values,
        "average": flat.optimizer.average,
        "average_square": flat.optimizer.average_square,
    }
    return {**tensors, "value": flat.master} if flat.mixed else tensors
