"""Dropout that is the same for every layout: whether an element is dropped is a hash of the seed,
the place in the model, and the element's row in the whole run and column.

The hash takes 31-bit numbers in int64, with operators that every chip has.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

BITS = 31
LOW = (1 << BITS) - 1
MULTIPLIERS = (0x7FEB352D, 0x2C1B3C6D)


class Dropout(nn.Module):
    """Drops elements of a [rows, columns] tensor, and scales the others up."""

    def __init__(self, probability: float, seed: int, place: str) -> None:
        super().__init__()
        self.probability = probability
        digest = hashlib.sha256(f"{seed}/dropout/{place}".encode()).digest()
        self.key = int.from_bytes(digest[:4], "little") & LOW

    def forward(self, x: Tensor, hashes: tuple[Tensor, Tensor] | None) -> Tensor:
        """Returns x with elements dropped, as `hashes` of its rows and columns say; None: none."""
        if hashes is None:
            return x
        rows, columns = hashes
        element = _mixed(_mixed(rows ^ (columns ^ self.key), 0), 1)
        dropped = element < round(self.probability * (LOW + 1))
        return (x * (1 / (1 - self.probability))).masked_fill(dropped, 0)


def row_and_column_hashes(rows: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Returns hashes of a tensor's rows, [rows, 1], and columns, [columns].

    rows: the tensor's, counted over the whole run, int64 [rows].
    """
    row, device = rows.unsqueeze(1), rows.device
    low = _mixed(row & LOW, 0)
    row = _mixed(low.bitwise_xor_(row >> BITS), 1)
    # the multipliers the other way round: else row n would be hashed as column n
    return row, _mixed(_mixed(torch.arange(columns, device=device), 1), 0)


def _mixed(number: Tensor, multiplier: int) -> Tensor:
    """Hashes numbers below 2 ** 31 in place; the hashes are below 2 ** 31 too."""
    number.mul_(MULTIPLIERS[multiplier])  # below 2 ** 62
    return number.bitwise_xor_(number >> 15).bitwise_and_(LOW)
