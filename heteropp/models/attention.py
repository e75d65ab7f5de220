"""Causal attention by explicit scores, which the backward finds kept or computes again.

Scores grow with the square of the sequence, and cost little beside the products with weights: to
compute them alone again is selective recompute (Reducing Activation Recomputation in Large
Transformer Models, section 5).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def mix(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None = None
) -> Tensor:
    """Returns attention's values mixed by its scores, [pairs, n x queries, size].

    query: [pairs, n x queries, size]; key: [pairs, size, length]; value: [pairs, length, size]. A
    pair is a sequence and a kv head, which n query heads share. The mask, [1 or sequences, 1,
    queries, length], is added to the scores. scale: of the scores; absent, size ** -0.5.
    """
    queries, length = mask.shape[-2:]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query @ key).view(len(mask), -1, queries, length)
    scores = torch.add(mask, scores, alpha=scale)
    return torch.softmax(scores, -1).view(len(query), -1, length) @ value


def mix_again(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Returns what `mix` does, bit for bit, and computes the scores once more in the backward."""
    result: Tensor = _MixAgain.apply(query, key, value, mask)
    return result


class _MixAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        return mix(query, key, value, mask)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *saved, mask = ctx.saved_tensors
        query, key, value = (each.detach().requires_grad_() for each in saved)
        with torch.enable_grad():
            mixed = mix(query, key, value, mask)
        return *torch.autograd.grad(mixed, (query, key, value), gradient), None
