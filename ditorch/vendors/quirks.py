"""What scripts expect of every device and some vendors' lack, handled in one place.

Nothing here runs for a vendor that declares no quirks. What cannot be reached from here stays the
vendor's own error: tensors that another plugin makes past aten::empty, and collectives issued
from C++ (functional collectives).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ditorch import _ditorch
from ditorch.vendors.vendor import Quirks


def handle(device_type: str, quirks: Quirks) -> None:
    """Makes `device_type` behave as `quirks` declares. Call it once."""
    if quirks.refused:
        _ditorch.refuse_dtypes(device_type, dict(quirks.refused))
    if quirks.substitutes:
        _ditorch.substitute_dtypes(device_type, dict(quirks.substitutes))
        _convert_loaded_tensors(device_type, quirks)
    if (quirks.average_by_sum or quirks.collectives_refused) and torch.distributed.is_available():
        _wrap_reductions(device_type, quirks)


def _convert_loaded_tensors(device_type: str, quirks: Quirks) -> None:
    """torch.load and torch.multiprocessing move bytes first and name their dtype after."""
    rebuild = torch._utils._rebuild_tensor

    def rebuild_converted(storage: Any, offset: int, size: Any, stride: Any) -> torch.Tensor:
        device = storage._untyped_storage.device
        if device.type != device_type or storage.dtype not in quirks.substitutes:
            return rebuild(storage, offset, size, stride)
        return rebuild(storage.cpu(), offset, size, stride).to(device)

    torch._utils._rebuild_tensor = rebuild_converted


# ProcessGroup's methods that reduce -> where their inputs are among the arguments, and whether
# the collective writes its result into them.
_REDUCTIONS = {
    "allreduce": (0, True),
    "allreduce_coalesced": (0, True),
    "reduce": (0, True),
    "reduce_scatter": (1, False),
    "_reduce_scatter_base": (1, False),
    "reduce_scatter_tensor_coalesced": (1, False),
}


def _wrap_reductions(device_type: str, quirks: Quirks) -> None:
    """Every reduction of torch.distributed's Python functions goes through these methods."""
    import torch.distributed as dist

    def wrap(name: str, inputs_at: int, in_place: bool) -> None:
        reduce: Callable[..., Any] = getattr(dist.ProcessGroup, name)

        def reduce_with_quirks(group: Any, *arguments: Any, **named: Any) -> Any:
            if len(arguments) > inputs_at:
                arguments = _adapt(group, arguments, inputs_at, in_place, named)
            return reduce(group, *arguments, **named)

        setattr(dist.ProcessGroup, name, reduce_with_quirks)

    def _adapt(group: Any, arguments: Any, inputs_at: int, in_place: bool, named: Any) -> Any:
        inputs = arguments[inputs_at]
        tensors = _tensors(inputs)
        if not any(tensor.device.type == device_type for tensor in tensors):
            return arguments
        for tensor in tensors:
            if advised := quirks.collectives_refused.get(tensor.dtype):
                raise TypeError(
                    f"the device {device_type} cannot reduce {tensor.dtype} between chips; "
                    f"use {advised}"
                )
        options: Any = named.get("opts", arguments[-1])
        is_average = getattr(options, "reduceOp", None) == dist.ReduceOp.AVG
        if not (quirks.average_by_sum and is_average):
            return arguments
        options.reduceOp = dist.ReduceOp.SUM
        divided = _divided(inputs, group.size(), in_place)
        return (*arguments[:inputs_at], divided, *arguments[inputs_at + 1 :])

    for name, (inputs_at, in_place) in _REDUCTIONS.items():
        wrap(name, inputs_at, in_place)


def _tensors(inputs: Any) -> list[torch.Tensor]:
    if isinstance(inputs, torch.Tensor):
        return [inputs]
    return [tensor for part in inputs for tensor in _tensors(part)]


def _divided(inputs: Any, ranks: int, in_place: bool) -> Any:
    """Division comes before the sum: it then needs no wait for an asynchronous one."""
    if isinstance(inputs, torch.Tensor):
        return inputs.div_(ranks) if in_place else inputs / ranks
    return [_divided(part, ranks, in_place) for part in inputs]
