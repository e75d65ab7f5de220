"""Causal attention of a sequence's last tokens, by kernels that know whole squares of it alone.

One call is of the tokens before, all of which they see, and one of their own. Each says what the
powers of its scores sum up to, which tells its share of the result; and a kernel's backward that is
given the sum of both leaves the gradients of its own part (Ring Attention, Liu et al., section 3).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ON_HOST = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_ON_HOST_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class LastTokens(torch.autograd.Function):
    """Takes query, key, value and the scale as heteropp.models.fused_attention.attend does."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        before = key.shape[1] - query.shape[1]
        earlier = attend_to(query, key[:, :before], value[:, :before], False, scale)
        own = attend_to(query, key[:, before:], value[:, before:], True, scale)
        mixed, sums = joined(earlier, own)
        _, _, *beside = own
        ctx.save_for_backward(query, key, value, mixed, sums, *beside[:2])
        ctx.scale = scale
        return mixed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, mixed, sums, *beside = ctx.saved_tensors
        before = key.shape[1] - query.shape[1]
        parts = (slice(None, before), False), (slice(before, None), True)
        of_queries, of_keys, of_values = zip(
            *(
                attend_to_backward(
                    *(gradient, query, key[:, tokens], value[:, tokens], mixed, sums),
                    *(causal, beside, ctx.scale),
                )
                for tokens, causal in parts
            ),
            strict=True,
        )
        earlier, own = of_queries
        return earlier + own, torch.cat(of_keys, 1), torch.cat(of_values, 1), None


def joined(earlier: tuple[Tensor, ...], own: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Returns what queries make of the tokens of two calls, and the log-sum-exp of all scores."""
    (of_earlier, earlier_sums, *_), (of_own, own_sums, *_) = earlier, own
    largest = torch.maximum(earlier_sums, own_sums)
    powers = (earlier_sums - largest).exp() + (own_sums - largest).exp()
    sums = largest + powers.log()
    # each by its own share: in 16 bits, what one share leaves to the other may be all lost
    earlier_share, own_share = (
        (each - sums).exp().transpose(1, 2).unsqueeze(-1).to(of_own.dtype)
        for each in (earlier_sums, own_sums)
    )
    return (of_earlier * earlier_share).addcmul_(of_own, own_share), sums


def attend_to(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, ...]:
    """Returns the output, log-sum-exp of the scores, and what the backward is given beside.

    query: [sequences, queries, heads, size]; key and value: of the tokens that they attend to.
    """
    found: tuple[Tensor, ...]
    if query.device.type == "cpu":
        heads_first = _heads_first(query, key, value)
        mixed, sums = _ON_HOST(*heads_first, 0.0, causal, scale=scale)
        return mixed.transpose(1, 2), sums
    found = torch.ops.aten._flash_attention_forward(
        *(query, key, value, None, None, query.shape[1], key.shape[1], 0.0, causal, False),
        scale=scale,
    )
    return found


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """Returns them as the host's kernel takes them: it does not look at the stride of a row."""
    rows = (each if each.stride(-1) == 1 else each.contiguous() for each in tensors)
    return [each.transpose(1, 2) for each in rows]


def attend_to_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixed: Tensor,
    sums: Tensor,
    causal: bool,
    beside: list[Tensor],
    scale: float | None,
) -> tuple[Tensor, ...]:
    """Returns the gradients of query, key and value, from the output and sums of all calls."""
    lengths = query.shape[1], key.shape[1]
    found: tuple[Tensor, ...]
    if query.device.type == "cpu":
        heads_first = _heads_first(gradient, query, key, value, mixed)
        found = _ON_HOST_BACKWARD(*heads_first, sums, 0.0, causal, scale=scale)
        return tuple(each.transpose(1, 2) for each in found)
    found = torch.ops.aten._flash_attention_backward(
        *(gradient, query, key, value, mixed, sums, None, None, *lengths, 0.0, causal, *beside),
        scale=scale,
    )
    return found
