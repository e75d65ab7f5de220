"""Where documents lie among rows that they share, worked out on the chip without asking it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """Documents that lie one after the other."""

    # where each begins and the next one with it, as FlashAttention's cu_seqlens: int32 [rows + 1],
    # as there may be as many documents as rows; those beyond the last one have no rows
    ends: Tensor
    of_rows: Tensor  # which each row is of, counted from 0 on: int64 [rows]

    @classmethod
    def of(cls, numbers: Tensor, length: int) -> Documents:
        """numbers: [rows], which are unlike within a sequence of `length` rows."""
        rows, by_sequence = len(numbers), numbers.view(-1, length)
        begins = torch.ones_like(by_sequence, dtype=torch.bool)
        begins[:, 1:] = by_sequence[:, 1:] != by_sequence[:, :-1]
        of_rows = begins.flatten().cumsum(0) - 1
        # a row that begins none is written behind all that is kept
        places = torch.where(begins.flatten(), of_rows, rows + 1)
        ends = torch.full((rows + 2,), rows, dtype=torch.int32, device=numbers.device)
        row = torch.arange(rows, dtype=torch.int32, device=numbers.device)
        return cls(ends.scatter_(0, places, row)[:-1], of_rows)

    def positions(self, length: int) -> Tensor:
        """Returns each row's place in its document, [sequences, length]."""
        rows = torch.arange(len(self.of_rows), device=self.of_rows.device)
        return (rows - self.ends[self.of_rows]).view(-1, length)
