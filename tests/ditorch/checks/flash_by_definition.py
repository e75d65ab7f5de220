"""FlashAttention by its definition, and rows to try it on: what its checks share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

SCALE = 0.3


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def rows_of(
    heads: int,
    kv_heads: int,
    size: int,
    value_size: int,
    dtype: torch.dtype,
    ends: Sequence[int] | None,
) -> list[Tensor]:
    """Query, key, value and the output's gradient: 2 sequences, or documents of 300 rows."""
    rows = (2, 150) if ends is None else (300,)
    return [
        drawn(*rows, heads, size, dtype=dtype, seed=1),
        drawn(*rows, kv_heads, size, dtype=dtype, seed=2),
        drawn(*rows, kv_heads, value_size, dtype=dtype, seed=3),
        drawn(*rows, heads, value_size, dtype=dtype, seed=4),
    ]


def by_definition(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    ends: Sequence[int] | None,
    soft_cap: float = 0.0,
    kept: Tensor | None = None,
) -> Tensor:
    """Causal attention. kept: what each weight is multiplied by, 0 where it is dropped."""
    sharing = query.shape[-2] // key.shape[-2]
    key, value = (each.repeat_interleave(sharing, -2).transpose(-2, -3) for each in (key, value))
    scores = query.transpose(-2, -3) @ key.mT * SCALE
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    rows = torch.arange(scores.shape[-1])
    apart = rows.unsqueeze(1) - rows
    seen = (apart >= 0) & (apart < (window or len(rows)))
    if ends is not None:
        document = torch.bucketize(rows, torch.tensor(ends[1:]), right=True)
        seen &= document.unsqueeze(1) == document
    weights = torch.softmax(scores.masked_fill(~seen, -math.inf), -1)
    return ((weights if kept is None else weights * kept) @ value).transpose(-2, -3)


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    slack = 30 * torch.finfo(dtype).eps if dtype.itemsize > 2 else torch.finfo(dtype).eps
    largest = max(1.0, wanted.abs().max().item())
    torch.testing.assert_close(
        found.detach().cpu().double(), wanted.detach(), rtol=0, atol=slack * largest
    )


def same(found: Tensor, wanted: Tensor) -> None:
    """Two ways in float32 to one result."""
    largest = max(1.0, wanted.abs().max().item())
    torch.testing.assert_close(found.cpu(), wanted.cpu(), rtol=0, atol=1e-5 * largest)
