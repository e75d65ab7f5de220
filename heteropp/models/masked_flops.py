"""FLOPs that torch's counter takes for computed and a kernel of attention leaves out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from heteropp.models.attention_work import forward_flops, seen_pairs
from heteropp.models.causal_attention import causal_inputs
from heteropp.models.fused_attention import capped_flash_attention


class MaskedFlops(TorchFunctionMode):
    """Counts a forward's products of queries with keys that these do not see.

    torch's counter, which runs below, is shown products of all of them, in any case.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.head_sizes: set[tuple[int, int]] = set()  # of queries and keys, and of values
        self.caps_scores = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_capped = func is capped_flash_attention
        if is_capped or func is torch.ops.aten._flash_attention_forward:
            self.caps_scores |= is_capped
            query, key, value = (each.transpose(1, 2) for each in args[:3])
            before = kwargs["window_size_left"]
            self._count(query, value, None if before is None else before + 1)
            mixed = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            return (mixed.transpose(1, 2),)
        if (inputs := causal_inputs(func, args, kwargs)) is not None:
            query, _, value = inputs
            self._count(query, value)
        return func(*args, **kwargs)

    def _count(self, query: Tensor, value: Tensor, window: int | None = None) -> None:
        sequences, heads, queries, size = query.shape
        length = value.shape[-2]
        self.head_sizes.add((size, value.shape[-1]))
        masked = sequences * heads * (queries * length - seen_pairs(length, window, queries))
        self.total += forward_flops(masked, size, value.shape[-1])
