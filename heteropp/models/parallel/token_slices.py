"""Slices: the tokens of a micro-batch's sequences cut into parts that one rank runs in turn.

The forward goes from the first slice to the last, so that keys and values of the tokens before are
there when a slice asks for them; the backward goes from the last to the first, so that a slice's
keys and values have all the gradients of later tokens when their own backward runs (TeraPipe, Li et
al., section 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heteropp.models.parallel.token_context import TokenContext


@dataclass
class Kept:
    """What the slices of a micro-batch keep for each other in one place."""

    # of all tokens, from the first slice's forward until its backward
    values: Tensor | None = None
    gradients: Tensor | None = None  # from the last slice's backward until the first one's


class TokenSlice(TokenContext):
    """One slice of a micro-batch."""

    def __init__(
        self, parts: tuple[tuple[int, int], ...], index: int, kept: dict[nn.Module, Kept]
    ) -> None:
        """kept: what all slices of the micro-batch share, empty before the first one's forward."""
        self.parts, self.index, self.kept = parts, index, kept

    def with_earlier(self, x: Tensor, place: nn.Module) -> Tensor:
        kept = self.kept.setdefault(place, Kept())
        length = self.parts[-1][1]
        found: Tensor = _WithEarlierSlices.apply(x, self.parts[self.index], length, kept)
        return found


class _WithEarlierSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, part: tuple[int, int], length: int, kept: Kept) -> Tensor:
        ctx.part, ctx.kept = part, kept
        first, last = part
        if kept.values is None:
            sequences, _, *rest = x.shape
            kept.values = x.new_empty(sequences, length, *rest)
        kept.values[:, first:last] = x  # a second time in a recompute, and the same
        # what autograd keeps of it counts its own changes: later slices write other tokens alone
        return kept.values.data[:, :last]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (first, last), kept = ctx.part, ctx.kept
        if kept.gradients is None:
            assert kept.values is not None
            kept.gradients = torch.zeros_like(kept.values)
        kept.gradients[:, :last] += gradient
        own = kept.gradients[:, first:last]  # to which no earlier slice adds
        if not first:
            kept.values = kept.gradients = None
        return own, None, None, None
