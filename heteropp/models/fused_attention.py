"""Causal attention in one kernel of the chip, which keeps no scores (FlashAttention, Dao et al.).

Memory grows with the length of a sequence, also where a window or documents bound what a token
sees: they are arguments of the kernel, and no mask is made of them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.checkpoint import checkpoint

from heteropp.models.documents import Documents
from heteropp.models.last_tokens import LastTokens
from heteropp.models.parallel.context_attention import ContextAttention
from heteropp.models.parallel.context_parallel import ContextParallelGroup
from heteropp.models.parallel.token_context import TokenContext, own_part

BLOCK = 1024  # queries that a CPU looks through a window with at a time


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int | None = None,
    documents: Documents | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    context: TokenContext | None = None,
    place: nn.Module | None = None,
) -> Tensor:
    """Returns values mixed by attention, [sequences, queries, heads, value size].

    query, key and value: [sequences, tokens, heads, size], of whole sequences, or of the part that
    a pass has, as its context says; without one, queries may be of the last tokens alone. Keys and
    values have as many heads as queries, or fewer. place: the module that attends in a context.
    window: how many tokens one sees at most, itself included; None: all before it. documents: None:
    sequences are whole. scale: of the scores; absent, size ** -0.5. soft_cap: a bound of the
    scores, which they near as a hyperbolic tangent does.
    """
    queries = query.shape[1]
    _, length = own_part(context, key.shape[1])
    if window is not None and window >= length:
        window = None
    is_plain = window is None and documents is None and soft_cap is None
    on_host = query.device.type == "cpu"  # its kernel takes values of the queries' size alone
    tells_shares = is_plain and not (on_host and query.shape[-1] != value.shape[-1])
    if tells_shares and isinstance(context, ContextParallelGroup):
        of_part: Tensor = ContextAttention.apply(query, key, value, scale, context)
        return of_part
    if context is not None:
        assert place is not None
        key, value = context.keys_and_values(key, value, place)
    if is_plain and queries == length:
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True, scale=scale
        )
        return mixed.transpose(1, 2)
    shape = *query.shape[:-1], value.shape[-1]
    if tells_shares:
        last_tokens: Tensor = LastTokens.apply(query, key, value, scale)
        return last_tokens
    if on_host:
        return _on_host(query, key, value, window, documents, scale, soft_cap).view(shape)
    ends: tuple[Tensor | None, Tensor | None] = None, None
    if documents is not None:
        query, key, value = (each.flatten(0, 1) for each in (query, key, value))
        ends = documents.ends_of_queries, documents.ends
    options: dict[str, Any] = dict(
        scale=scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )
    flash: Any = torch.ops.aten._flash_attention_forward
    if soft_cap is not None:
        flash, options["soft_cap"] = capped_flash_attention, soft_cap
    mixed, *_ = flash(*(query, key, value, *ends, queries, length, 0.0, True, False), **options)
    return mixed.view(shape)


def capped_flash_attention(query: Tensor, *args: Any, **options: Any) -> tuple[Tensor, ...]:
    """FlashAttention as ATen has it, with a soft cap, which it has not: ditorch's operator.

    Modes that look on see one function, as they see ATen's operator.
    """
    if has_torch_function((query,)):
        found: tuple[Tensor, ...] = handle_torch_function(
            capped_flash_attention, (query,), query, *args, **options
        )
        return found
    mixed: tuple[Tensor, ...] = torch.ops.ditorch._flash_attention_forward(query, *args, **options)
    return mixed


def _on_host(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    documents: Documents | None,
    scale: float | None,
    soft_cap: float | None,
) -> Tensor:
    """Computes the same on a CPU, for which PyTorch has no such kernel: piece by piece."""
    if documents is None:
        sizes = ((len(each), each.shape[1]) for each in (query, key))
        ends = [[*range(0, count * length + 1, length)] for count, length in sizes]
    else:
        ends = [each.tolist() for each in (documents.ends_of_queries, documents.ends)]
    query, key, value = (each.flatten(0, 1) for each in (query, key, value))
    mixed = [
        _through_window(
            *(query[slice(*own)], key[slice(*all_)], value[slice(*all_)]), window, scale, soft_cap
        )
        for own, all_ in zip(*map(pairwise, ends), strict=True)
        if own[0] < own[1]
    ]
    return torch.cat(mixed)


def _through_window(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    scale: float | None,
    soft_cap: float | None,
) -> Tensor:
    """query, key and value: of a document, [queries or length, heads, size]."""
    length = len(key)
    before = length - len(query)  # keys before the first query's own
    window = length if window is None else min(window, length)
    block = BLOCK if window < length or before or soft_cap is not None else length
    mixed = []
    for first in range(before, length, block):
        oldest, end = max(0, first + 1 - window), min(length, first + block)
        own, *seen = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
        own = own[:, :, first - before : end - before]
        seen = [each[:, :, oldest:end] for each in seen]
        # the mask is made again in the backward, so that the whole is never there
        again = checkpoint(
            _block, own, *seen, first - oldest, window, scale, soft_cap, use_reentrant=False,
            preserve_rng_state=False,
        )  # fmt: skip
        mixed.append(again[0].transpose(0, 1))
    return torch.cat(mixed)


def _block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: int,
    window: int,
    scale: float | None,
    soft_cap: float | None,
) -> Tensor:
    """first: which of the keys is the first query's own."""
    apart = torch.arange(first, first + query.shape[2]).unsqueeze(1) - torch.arange(key.shape[2])
    mask = (apart >= 0) & (apart < window)
    if soft_cap is None:
        mixed: Tensor = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, enable_gqa=True, scale=scale
        )
        return mixed
    sharing = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(sharing, 1) for each in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = torch.tanh(scores / soft_cap) * soft_cap
    return torch.softmax(scores.masked_fill(~mask, -torch.inf), -1) @ value
