"""Where documents lie among rows that they share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """A micro-batch's documents, which lie one after the other.

    There are as many as kernels are told, as FlashAttention's backward takes memory for each.
    """

    # where each begins and the next one with it, as FlashAttention's cu_seqlens: int32
    # [documents + 1]; those beyond the last one have no rows
    ends: Tensor
    of_rows: Tensor  # which each row is of, counted from 0 on: int64 [rows]
    # the same as `ends`, counted in the rows that attend alone
    ends_of_queries: Tensor

    @classmethod
    def of_step(
        cls, numbers: Tensor, length: int, device: torch.device | str = "cpu", first: int = 0
    ) -> list[Documents]:
        """Returns the documents of each micro-batch, on a device.

        numbers: [micro-batches, rows] on the host, which counts them: they are unlike within a
        sequence of `length` rows, of which those from `first` on attend. All are told the number
        of documents of the micro-batch that has most, up to a power of two, so that steps are of
        few unlike shapes.
        """
        micro_batches, rows = numbers.shape
        by_sequence = numbers.view(-1, length)
        begins = torch.ones_like(by_sequence, dtype=torch.bool)
        begins[:, 1:] = by_sequence[:, 1:] != by_sequence[:, :-1]
        begins = begins.view(micro_batches, rows)
        of_rows = begins.cumsum(1) - 1
        most = int(of_rows.max()) + 1
        told = min(rows, 1 << (most - 1).bit_length())
        ends = torch.full((micro_batches, told + 1), rows, dtype=torch.int32)
        micro_batch, row = begins.nonzero(as_tuple=True)
        ends[micro_batch, of_rows[micro_batch, row]] = row.int()
        if not first:  # kernels know by the one tensor that queries and keys are alike
            pairs = zip(ends.to(device), of_rows.to(device), strict=True)
            return [cls(own, rows, own) for own, rows in pairs]
        own = ends // length * (length - first) + (ends % length - first).clamp(min=0)
        tables = (each.to(device) for each in (ends, of_rows, own))
        return [cls(*each) for each in zip(*tables, strict=True)]

    def positions(self, length: int) -> Tensor:
        """Returns each row's place in its document, [sequences, length]."""
        rows = torch.arange(len(self.of_rows), device=self.of_rows.device)
        return (rows - self.ends[self.of_rows]).view(-1, length)
