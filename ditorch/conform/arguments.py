"""An operator's arguments, copied to a device as they are: strides, offsets, sharing and all."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map


def copy_to(arguments: Any, device: torch.device) -> Any:
    """A copy of a tree of arguments in which tensors, devices and generators are `device`'s.

    Tensors that shared memory share it in the copy; those that needed gradients are leaves that do.
    """
    storages: dict[int, torch.Tensor] = {}
    tensors: dict[int, torch.Tensor] = {}

    def copy(value: Any) -> Any:
        if isinstance(value, torch.device):
            return device
        if isinstance(value, str) and value == "cpu":
            return str(device)
        if isinstance(value, torch.Generator):
            return torch.Generator(device).manual_seed(value.initial_seed())
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in tensors:
            tensors[id(value)] = _copy(value, device, storages)
        return tensors[id(value)]

    return tree_map(copy, arguments)


def _copy(
    value: torch.Tensor, device: torch.device, storages: dict[int, torch.Tensor]
) -> torch.Tensor:
    source = value.detach()
    if source.layout != torch.strided or source.is_quantized:
        return source.to(device, copy=True).requires_grad_(value.requires_grad)
    if source._is_zerotensor():  # stands for zeros without having memory
        zeros = torch.zeros(source.shape, dtype=source.dtype, device=device)
        return zeros.requires_grad_(value.requires_grad)
    is_conj, is_neg = source.is_conj(), source.is_neg()
    source = source.conj() if is_conj else source
    source = source._neg_view() if is_neg else source
    storage = source.untyped_storage()
    if storage._cdata not in storages:
        bytes_ = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
        storages[storage._cdata] = bytes_.to(device, copy=True)
    result = torch.empty(0, dtype=source.dtype, device=device).set_(
        storages[storage._cdata].untyped_storage(),  # type: ignore[call-overload]
        source.storage_offset(), source.size(), source.stride(),
    )  # fmt: skip
    result = result.conj() if is_conj else result
    result = result._neg_view() if is_neg else result
    return result.requires_grad_(value.requires_grad)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def shared_memory(outputs: Any, inputs: Any) -> set[tuple[int, int]]:
    """(output, input) positions of the tensors that live in one storage."""
    places = [tensor.untyped_storage()._cdata for tensor in _strided(inputs)]
    return {
        (i, j)
        for i, output in enumerate(_strided(outputs))
        for j, place in enumerate(places)
        if output.untyped_storage()._cdata == place
    }


def _strided(tree: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(tree) if tensor.layout == torch.strided]
