"""Attention of sequences that are cut over ranks: keys and values travel while attention runs.

A rank's queries meet the keys of its own tokens while those of the tokens before are on their way
to it, and then these; each of the two calls tells its share of the result. In the backward, the
gradients that belong to other ranks come first, and travel while those of the own tokens are
computed (Ring Attention, Liu et al., section 3; causal, so that each rank is sent by all before it
at once, and needs no ring).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heteropp.models.last_tokens import attend_to, attend_to_backward, joined
from heteropp.models.parallel.context_parallel import ContextParallelGroup


class ContextAttention(torch.autograd.Function):
    """Takes the query, key and value of a rank's own tokens, the scale, and the ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        group: ContextParallelGroup,
    ) -> Tensor:
        sizes = key.shape[-1], value.shape[-1]
        both = torch.cat((key, value), -1)
        coming = group.send_on(both)
        key, value = both.split(sizes, -1)
        mixed, sums, *beside = own = attend_to(query, key, value, True, scale)
        before, earlier = coming(), None
        if before:
            earlier = torch.cat(before, 1) if len(before) > 1 else before[0]
            del before, coming  # which hold them, too
            key, value = earlier.split(sizes, -1)
            mixed, sums = joined(attend_to(query, key, value, False, scale), own)
        ctx.save_for_backward(query, both, earlier, mixed, sums, *beside[:2])
        ctx.sizes, ctx.scale, ctx.group = sizes, scale, group
        return mixed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, both, earlier, mixed, sums, *beside = ctx.saved_tensors

        def gradients(tokens: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
            """Returns those of the query, and of keys and values."""
            key, value = tokens.split(ctx.sizes, -1)
            of_query, *of_both = attend_to_backward(
                gradient, query, key, value, mixed, sums, causal, beside, ctx.scale
            )
            return of_query, torch.cat(of_both, -1)

        of_earlier = None
        if earlier is not None:
            of_query, of_earlier = gradients(earlier, False)
        coming = ctx.group.send_back(of_earlier, both)
        of_earlier = None  # it is held until it has been sent
        of_own_query, own = gradients(both, True)
        for other in coming():
            own += other
        if earlier is not None:
            of_own_query += of_query
        return of_own_query, *own.split(ctx.sizes, -1), None, None
