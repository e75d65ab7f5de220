"""What causal attention in one kernel computes: the pairs of tokens that see each other.

The charging rule of csrc/ditorch/abi/runtime.h, in csrc/ditorch/ops/attention_work.cpp's words.
"""

from __future__ import annotations


def seen_pairs(length: int, window: int | None = None, queries: int | None = None) -> int:
    """Returns how many pairs of a query and a key before it, or its own, a sequence has.

    window: how many keys a query sees at most, its own included; None: all before it. queries: how
    many of the last tokens attend; None: all.
    """
    if queries is not None and queries < length:
        return seen_pairs(length, window) - seen_pairs(length - queries, window)
    beyond = 0 if window is None else max(0, length - window)
    return (length * (length + 1) - beyond * (beyond + 1)) // 2


def forward_flops(pairs: int, size: int, value_size: int) -> int:
    """Returns the FLOPs of so many pairs of all heads: of scores, and of mixing values by them."""
    return 2 * pairs * (size + value_size)


def backward_flops(pairs: int, size: int, value_size: int) -> int:
    """Returns the same of the backward, which computes scores anew: three products and two."""
    return 2 * pairs * (3 * size + 2 * value_size)
