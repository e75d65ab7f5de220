"""Tensors inside an operator's arguments and results: finding, naming and copying them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ditorch.precision import definitions
from ditorch.precision.call import Call

# Operators about a tensor's memory rather than its elements.
_ABOUT_MEMORY = {
    "aten._pin_memory",
    "aten._resize_output_",
    "aten._unsafe_view",
    "aten.empty",
    "aten.empty_like",
    "aten.empty_permuted",
    "aten.empty_strided",
    "aten.is_pinned",
    "aten.is_set_to",
    "aten.lift_fresh",
    "aten.new_empty",
    "aten.new_empty_strided",
    "aten.record_stream",
}
_OVERWRITES = {
    "aten.copy_",
    "aten.fill_",
    "aten.zero_",
    "aten._foreach_copy_",
    "aten._foreach_zero_",
}
_RUNNING = {"running_mean", "running_var"}
_UNDECLARED_WRITES = {
    f"aten::{name}_batch_norm": _RUNNING for name in ("native", "cudnn", "miopen")
}
_WRITES_NOTHING = {"c10d::send", "c10d::barrier", "c10d::monitored_barrier_", "c10d::check_for_nan"}
_RECEIVES = {"c10d::recv_", "c10d::recv_any_source_"}


def map_tensors(values: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nest of lists and tuples with every tensor changed.

    A tensor that occurs twice is changed once, so that aliased arguments stay aliased.
    """
    changed: dict[int, Tensor] = {}

    def visit(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in changed:
                changed[id(value)] = change(value)
            return changed[id(value)]
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            return type(value)(visit(each) for each in value)
        if isinstance(value, dict):
            return {key: visit(each) for key, each in value.items()}
        return value

    return visit(values)


def named_tensors(values: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """("out", t) for one tensor, ("out.0", a), ("out.1", b) for several."""
    if isinstance(values, Tensor):
        yield name, values
    elif isinstance(values, (list, tuple)):
        for position, value in enumerate(values):
            yield from named_tensors(value, f"{name}.{position}")


def inputs(call: Call) -> Iterator[tuple[str, Tensor]]:
    """The call's tensor arguments by the names of the operator's schema."""
    for position, argument in enumerate(call.func._schema.arguments):
        if position < len(call.args):
            yield from named_tensors(call.args[position], argument.name)
        elif argument.name in call.kwargs:
            yield from named_tensors(call.kwargs[argument.name], argument.name)


def written_names(call: Call) -> set[str]:
    """Names of the arguments the operator writes: in-place, out= and what others sent."""
    if call.func.namespace == "c10d":  # whose schemas do not say; the first argument is the output
        silent = call.func._schema.name in _WRITES_NOTHING
        return set() if silent else {call.func._schema.arguments[0].name}
    declared = {
        argument.name
        for argument in call.func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    return declared | _UNDECLARED_WRITES.get(call.func._schema.name, set())


def written_tensors(call: Call) -> list[tuple[str, Tensor]]:
    """The tensor arguments that the call writes, named like `inputs`."""
    names = written_names(call)
    return [(name, tensor) for name, tensor in inputs(call) if name.split(".")[0] in names]


def read_tensors(call: Call) -> list[tuple[str, Tensor]]:
    """The tensor arguments whose elements the call reads, named like `inputs`."""
    unread = {
        argument.name
        for argument in call.func._schema.arguments
        if argument.kwarg_only and argument.alias_info is not None and argument.alias_info.is_write
    }
    if call.func.namespace == "c10d":
        separate = any("input" in argument.name for argument in call.func._schema.arguments)
        if separate or call.func._schema.name in _RECEIVES:
            unread = written_names(call)
    elif is_random(call) or call.operator.rpartition(".")[0] in _OVERWRITES:
        unread = written_names(call)
    return [(name, tensor) for name, tensor in inputs(call) if name.split(".")[0] not in unread]


def chip_of(call: Call) -> torch.device | None:
    """The chip the call runs on; None if it runs on the host anyway."""
    asked = [value for value in (*call.args, *call.kwargs.values()) if type(value) is torch.device]
    devices = asked + [tensor.device for _, tensor in inputs(call)]
    return next((each for each in devices if each.type not in ("cpu", "meta")), None)


def has_to_stay(call: Call) -> bool:
    """Whether the call computes nothing: it is about the very memory it was given."""
    return _is_about_memory(call.func)


@cache
def _is_about_memory(func: OpOverload) -> bool:
    return (
        _only_shows(func)
        or torch.Tag.inplace_view in func.tags
        or str(func).rpartition(".")[0] in _ABOUT_MEMORY
    )


def is_view(call: Call) -> bool:
    """Whether the call computes nothing: its results only show its argument's memory."""
    return _only_shows(call.func)


@cache
def _only_shows(func: OpOverload) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(
        each.alias_info is not None and not each.alias_info.is_write for each in returns
    )


def is_random(call: Call) -> bool:
    """Whether the operator draws random numbers: two right results need not be equal."""
    return torch.Tag.nondeterministic_seeded in call.func.tags and dropout_of(call) != 0


def dropout_of(call: Call) -> float | None:
    """The share of weights that attention drops; None: the operator is no attention."""
    share: float | None = definitions.argument(call, "dropout_p")
    return share


def is_communication(call: Call) -> bool:
    return call.func.namespace in ("c10d", "_c10d_functional", "c10d_functional")


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, of the same dtype; later writes do not reach it."""
    copied = tensor.detach().to("cpu", copy=True)
    return copied.resolve_conj().resolve_neg()
