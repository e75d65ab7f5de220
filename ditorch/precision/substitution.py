"""Runs an operator on other tensors than its caller's: copies on the host, or in another dtype.

The caller must not notice anything else. What the operator writes is written into the caller's own
tensors, results that are arguments stay those very tensors, arguments that share memory still share
it, and an `out=` that was resized is resized.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ditorch.precision.call import Call
from ditorch.precision.select import Select
from ditorch.precision.tensors import inputs, is_communication, map_tensors, written_tensors
from ditorch.precision.tool import Proceed

Change = Callable[[Tensor], Tensor]


def refuse_communication(call: Call, select: Select, what: str) -> None:
    """Raises RuntimeError if the tool was asked for this communication operator by name.

    The pattern "*" means all that can be done elsewhere, and passes communication over.
    """
    named = Select(operators=tuple(pattern for pattern in select.operators if pattern != "*"))
    if is_communication(call) and named.operators and named.matches_operator(call.operator):
        raise RuntimeError(
            f"{what}: {call.place} communicates, and only the process group can run it; name "
            f"computing operators"
        )


def with_arguments(call: Call, change: Callable[[str, Any], Any]) -> Call:
    """The call with each given argument replaced by `change(name, value)`."""
    names = [argument.name for argument in call.func._schema.arguments]
    args = tuple(change(name, value) for name, value in zip(names, call.args, strict=False))
    kwargs = {name: change(name, value) for name, value in call.kwargs.items()}
    return replace(call, args=args, kwargs=kwargs)


def run_elsewhere(call: Call, proceed: Proceed, change: Change, restore: Change) -> Any:
    """The call's result, from running it on changed tensors.

    Args:
        proceed: runs the changed call.
        change: another tensor with the same elements, or the same tensor to leave it.
        restore: brings a new result back.
    """
    shared = _shared_and_written(call)
    originals: dict[int, Tensor] = {}  # by the id of the changed tensor
    changed: dict[int, Tensor] = {}  # by the id of the original
    wholes: dict[tuple[int, torch.dtype], Tensor] = {}

    def enter(tensor: Tensor) -> Tensor:
        memory = _memory(tensor)
        if memory in shared:
            whole = wholes.setdefault(memory, change(_whole(tensor)))
            there = whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        else:
            there = change(tensor)
        originals[id(there)] = tensor
        changed[id(tensor)] = there
        return there

    def leave(result: Tensor) -> Tensor:
        return originals[id(result)] if id(result) in originals else restore(result)

    args, kwargs = map_tensors((call.args, call.kwargs), enter)
    results = proceed(replace(call, args=args, kwargs=kwargs))
    for _, tensor in written_tensors(call):
        _write(changed[id(tensor)], tensor)
    return map_tensors(results, leave)


def _write(source: Tensor, target: Tensor) -> None:
    if source is target:
        return
    if source.shape != target.shape:
        target.resize_(source.shape)
    target.copy_(source)


def _shared_and_written(call: Call) -> set[tuple[int, torch.dtype]]:
    """Memory that the call writes and that more than one of its arguments show."""
    written = {_memory(tensor) for _, tensor in written_tensors(call)}
    if not written:
        return set()
    distinct = {id(tensor): tensor for _, tensor in inputs(call)}
    users = Counter(_memory(tensor) for tensor in distinct.values())
    return {memory for memory in written if users[memory] > 1}


def _memory(tensor: Tensor) -> tuple[int, torch.dtype]:
    """Tells tensors apart by the memory that they show.

    Those of a plugin that tells no address, not even to torch, count as memory of their own each.
    """
    try:
        return tensor.untyped_storage().data_ptr(), tensor.dtype
    except RuntimeError:
        return -id(tensor), tensor.dtype


def _whole(tensor: Tensor) -> Tensor:
    """All of the memory that the tensor shows a part of."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((elements,), (1,), 0)
