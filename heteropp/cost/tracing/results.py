"""What operators make of meta tensors, asked of PyTorch once for each kind of arguments.

Many of PyTorch's meta kernels are written in Python and take a large part of a millisecond, while
a stage calls the same few operators on tensors of the same few shapes again and again.
"""

from __future__ import annotations

from collections.abc import Hashable
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
    of_args = _key((args, tuple(kwargs.items())))
    key = None if of_args is None else (func, of_args)
    layout = _known.get(key)
    if layout is not None:
        shape, strides, dtype = layout
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    result = func(*args, **kwargs)
    if key is not None and key not in _known and len(_known) < MOST_KNOWN:
        is_new = type(result) is Tensor and _is_new(func, result, tree_leaves((args, kwargs)))
        _known[key] = (result.shape, result.stride(), result.dtype) if is_new else None
    return result


def _is_new(func: Any, result: Tensor, given: list[Any]) -> bool:
    """Whether a result is all that an operator does. Some give a view and do not say so."""
    schema = func._schema
    if any(value.alias_info for value in (*schema.arguments, *schema.returns)):
        return False
    storages = {leaf.untyped_storage()._cdata for leaf in given if isinstance(leaf, Tensor)}
    return result.device.type == "meta" and result.untyped_storage()._cdata not in storages


def _key(value: Any) -> Hashable:
    """Returns what of an argument the layout of results depends on; None where nobody knows."""
    kind = type(value)
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype) if value.device.type == "meta" else None
    if kind in _PLAIN:
        return kind, value  # 1, 1.0 and True are equal, and not alike
    if kind is tuple or kind is list:
        keys = tuple([_key(each) for each in value])
        return None if None in keys else keys
    return None
