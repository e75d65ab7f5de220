"""Causal attention for transformers' modules, without a mask made anew in every forward.

It is registered with transformers as an attention function that needs no mask: what a family's
loop would make from position ids it then leaves out, and with it a read back from the chip.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

NAME = "heteropp"


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attends from [sequences, heads, length, size] to keys and values of as many or fewer heads.

    s_aux: a sink's logit for each head. Returns [sequences, length, heads, size] and the weights.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (_repeated(x, groups) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    length = scores.shape[-1]
    scores = scores + mask(length, sliding_window, scores.dtype, scores.device)
    if s_aux is not None:
        sinks = s_aux.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, length, -1)
        scores = torch.cat([scores, sinks], -1)
        scores = scores - scores.max(-1, keepdim=True).values
        weights = nn.functional.softmax(scores, -1, dtype=scores.dtype)[..., :-1]
    else:
        wide = torch.float32 if query.dtype.itemsize == 2 else query.dtype
        weights = nn.functional.softmax(scores, -1, dtype=wide).to(query.dtype)
    weights = nn.functional.dropout(weights, dropout, module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


@lru_cache(maxsize=64)
def mask(length: int, window: int | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns what is added to scores, [length, length]: a row attends to itself and those before.

    window: to so many of them at most, itself included.
    """
    rows = torch.arange(length)
    apart = rows.unsqueeze(1) - rows
    allowed = (apart >= 0) & (apart < (window or length))
    least = torch.finfo(dtype).min
    return torch.zeros(length, length, dtype=dtype).masked_fill(~allowed, least).to(device)


def _repeated(x: Tensor, times: int) -> Tensor:
    if times == 1:
        return x
    batch, heads, length, size = x.shape
    x = x[:, :, None].expand(batch, heads, times, length, size)
    return x.reshape(batch, heads * times, length, size)
