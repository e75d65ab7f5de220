"""A rank's state in flat buffers: those of a running training, and fresh ones for the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from heteropp.description.plan import Plan
from heteropp.layout.flat_buffer import BufferPiece
from heteropp.optimizer.zero import FlatParameters
from heteropp.state.slices.holdings import BufferSlice, flat_holdings
from heteropp.state.slices.quantities import Quantity, QuantityName, quantities_of

if TYPE_CHECKING:  # what a rank trains with is handed in
    from heteropp.runtime.step.update import Update

Buffers = dict[tuple[int, QuantityName], Tensor]  # by flat buffer of the rank, and quantity


def tensors(flat: FlatParameters) -> dict[QuantityName, Tensor]:
    """Returns a flat buffer's own tensors, by quantity.

    The value is a view of the parameter, unless the model has 16 bits.
    """
    return {
        "parameter": flat.values,
        "value": flat.master,
        "average": flat.optimizer.average,
        "average_square": flat.optimizer.average_square,
    }


def view(buffer: Tensor, piece: BufferPiece | BufferSlice) -> Tensor:
    """Returns a slice as a view of its quantity's buffer."""
    return buffer[piece.first : piece.last].view(piece.box.shape)


def of_training(update: Update) -> Buffers:
    """Returns the running training's own tensors.

    Where some of them come and go (Zorse's offload), it returns copies in host memory.
    """
    copies = update.load_parameters is not None
    buffers: Buffers = {}
    for k, flat in enumerate(update.each()):
        own = tensors(flat)
        for quantity in quantities_of(flat.module.model):
            tensor = own[quantity.name]
            buffers[k, quantity.name] = tensor.to("cpu", copy=True) if copies else tensor
    return buffers


def to_host(buffers: Buffers) -> None:
    """Moves one buffer after another to host memory, which makes room on the chip."""
    for key in buffers:
        buffers[key] = buffers[key].cpu()


def fresh(plan: Plan, rank: int, quantities: Sequence[Quantity], device: torch.device) -> Buffers:
    return {
        (k, quantity.name): torch.zeros(
            held.size(quantity), dtype=getattr(torch, quantity.dtype), device=device
        )
        for k, held in enumerate(flat_holdings(plan, rank))
        for quantity in quantities
    }


@torch.no_grad()
def fill(update: Update, buffers: Buffers) -> None:
    """Copies a training's state from buffers of the same plan and rank, and lets go of them."""
    for k, flat in enumerate(update.each()):
        own = tensors(flat)
        for quantity in quantities_of(flat.module.model):
            own[quantity.name].copy_(buffers.pop((k, quantity.name)))
