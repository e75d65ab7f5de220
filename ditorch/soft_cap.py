"""FlashAttention with a soft cap of its scores, which ATen's has not: its gradients and shapes.

`torch.ops.ditorch._flash_attention_forward` takes what `torch.ops.aten._flash_attention_forward`
does up to the windows, of [sequences, length, heads, size] or of documents that lie one after the
other, and `soft_cap`: scores are then soft_cap * tanh(scores / soft_cap), and 0 leaves them as they
are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_FORWARD, _BACKWARD = "ditorch::_flash_attention_forward", "ditorch::_flash_attention_backward"


def register() -> None:
    """Lets autograd and torch.compile know the operators."""
    torch.library.register_autograd(_FORWARD, _backward, setup_context=_keep)
    torch.library.register_fake(_FORWARD, _forward_shapes)
    torch.library.register_fake(_BACKWARD, _backward_shapes)


def _keep(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Any) -> None:
    query, key, value, *documents = inputs[:5]
    out, sums, drawn, unused, _ = output
    ctx.save_for_backward(query, key, value, out, sums, *documents, drawn, unused)
    ctx.others, ctx.options = inputs[5:9], keyword_only_inputs
    ctx.mark_non_differentiable(sums, drawn, unused)


def _backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    *tensors, drawn, unused = ctx.saved_tensors
    gradients = torch.ops.ditorch._flash_attention_backward(
        gradient, *tensors, *ctx.others, drawn, unused, **ctx.options
    )
    return *gradients, *[None] * 7


def _forward_shapes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends_of_queries: Tensor | None,
    ends_of_keys: Tensor | None,
    longest_query: int,
    longest_key: int,
    dropout: float,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, ...]:
    heads_first = query.transpose(-2, -3)
    wide = torch.promote_types(query.dtype, torch.float32)
    nothing = query.new_empty(0)
    drawn = query.new_empty((), dtype=torch.int64, device="cpu") if dropout else nothing
    return (
        query.new_empty(*query.shape[:-1], value.shape[-1]),
        heads_first.new_empty(heads_first.shape[:-1], dtype=wide),
        drawn,
        nothing.clone(),
        nothing.clone(),
    )


def _backward_shapes(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
