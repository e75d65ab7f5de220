"""What operators make of meta tensors, asked of PyTorch once for each kind of arguments.

Many of PyTorch's meta kernels are written in Python and take a large part of a millisecond, while
a stage calls the same few operators on tensors of the same few shapes again and again.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_PLAIN = {
    *(int, float, bool, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
}
_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]
_known: dict[Hashable, _Layout | None] = {}  # None: it has to be run each time
MOST_KNOWN = 1 << 16


def result_of(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns what an ATen operator returns; a new tensor without running it, where that is known.

    That is so of operators that return one new tensor, and change none.
    """
    of_args = _key((args, tuple(kwargs.items()))) if _makes_one(func) else None
    if of_args is None:
        return func(*args, **kwargs)
    key = func, torch.get_default_dtype(), of_args
    layout = _known.get(key)
    if layout is not None:
        shape, strides, dtype = layout
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    result = func(*args, **kwargs)
    if key not in _known and len(_known) < MOST_KNOWN:
        is_new = type(result) is Tensor and _is_new(result, tree_leaves((args, kwargs)))
        _known[key] = (result.shape, result.stride(), result.dtype) if is_new else None
    return result


@lru_cache(maxsize=4096)
def _makes_one(func: Any) -> bool:
    """Whether an operator returns one tensor, which is new as far as it says, and changes none."""
    arguments, returns = func._schema.arguments, func._schema.returns
    aliases = any(value.alias_info for value in (*arguments, *returns))
    return len(returns) == 1 and not aliases


def _is_new(result: Tensor, given: list[Any]) -> bool:
    """Whether a tensor is new indeed, and its layout says all of it. Some operators give a view and
    do not say so.
    """
    if result.device.type != "meta" or result.is_conj() or result.is_neg():
        return False
    storages = {leaf.untyped_storage()._cdata for leaf in given if isinstance(leaf, Tensor)}
    storage = result.untyped_storage()
    steps = sum((n - 1) * step for n, step in zip(result.shape, result.stride(), strict=True))
    elements = 1 + steps if result.numel() else 0
    is_all = storage.nbytes() == elements * result.element_size() and not result.storage_offset()
    return is_all and storage._cdata not in storages


def _key(value: Any) -> Hashable:
    """Returns what of an argument the layout of results depends on; None where nobody knows."""
    kind = type(value)
    if isinstance(value, Tensor):
        if value.device.type != "meta" or value.is_conj() or value.is_neg():
            return None
        return value.shape, value.stride(), value.dtype
    if kind in _PLAIN:
        return kind, value  # 1, 1.0 and True are equal, and not alike
    if kind is tuple or kind is list:
        keys = tuple([_key(each) for each in value])
        return None if None in keys else keys
    return None
