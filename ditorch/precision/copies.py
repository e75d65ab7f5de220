"""Copies of a call: on the host as it is, on the host in float64, or without elements ("meta")."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ditorch.precision.call import Call
from ditorch.precision.definitions import Results, argument
from ditorch.precision.substitution import with_arguments
from ditorch.precision.tensors import inputs, map_tensors, named_tensors, written_tensors

Change = Callable[[Tensor], Tensor]


def run_on_host(call: Call) -> Results:
    """The results and written arguments of a call on the host; its own tensors stay as they are."""
    written = {id(tensor) for _, tensor in written_tensors(call)}
    args, kwargs = map_tensors(
        (call.args, call.kwargs), lambda each: each.clone() if id(each) in written else each
    )
    call = replace(call, args=args, kwargs=kwargs)
    results = call.func(*args, **kwargs)
    return dict(outputs(call, results))


def outputs(call: Call, results: Any) -> list[tuple[str, Tensor]]:
    """The arguments the call writes by their names, then the results that are not arguments."""
    written = written_tensors(call)
    known = {id(tensor) for _, tensor in written}
    return written + [each for each in named_tensors(results, "out") if id(each[1]) not in known]


def on_host(call: Call) -> Call:
    """The call on copies in host memory."""

    def change(_: str, value: Any) -> Any:
        return _for_host(map_tensors(value, lambda tensor: tensor.detach().to("cpu")))

    return with_arguments(call, change)


def widened(call: Call, dtypes: dict[str, torch.dtype]) -> Call:
    """The call on float64 copies in host memory."""
    known = dtypes.values() or [tensor.dtype for _, tensor in inputs(call)]
    narrow = not any(dtype.itemsize > 4 for dtype in map(_part, known) if dtype.is_floating_point)
    arguments = call.func._schema.arguments
    scalars = {each.name for each in arguments if _is_operand(str(each.type))}

    def widen(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().to("cpu").resolve_conj().resolve_neg()
        if narrow and tensor.dim() == 0 and tensor.dtype is torch.float64:
            tensor = tensor.float()  # a number: rounded as below
        return tensor.to(_wide(tensor.dtype))

    if any(each.name == "eps" for each in arguments) and argument(call, "eps") is None:
        call = _with_eps(call, torch.finfo(torch.float32 if narrow else torch.float64).eps)
    wide: dict[int, Tensor] = {}

    def change(name: str, value: Any) -> Any:
        if name == "half_to_float":
            return False
        if isinstance(value, torch.dtype):
            return _wide(value)
        if narrow and name in scalars:  # torch rounds numbers to the dtype it computes in
            value = _as_float32(value)
        return _for_host(map_tensors(value, lambda each: _once(each, wide, widen)))

    return with_arguments(call, change)


def on_meta(call: Call) -> Results:
    """What the results' shapes and dtypes ought to be; nothing if torch has to compute to tell."""

    def to_meta(tensor: Tensor) -> Tensor:
        size, stride = tensor.size(), tensor.stride()
        return torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")

    meta: dict[int, Tensor] = {}

    def change(_: str, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("meta")
        return map_tensors(value, lambda each: _once(each, meta, to_meta))

    try:
        there = with_arguments(call, change)
        results = there.func(*there.args, **there.kwargs)
    except Exception:  # each operator's own check, or none: what is wrong shows as it runs
        return {}
    return dict(outputs(there, results))


def _with_eps(call: Call, eps: float) -> Call:
    """Left out, eps is that of the dtype the operator computes in."""
    position = [each.name for each in call.func._schema.arguments].index("eps")
    return replace(call, args=call.args[:position], kwargs=call.kwargs | {"eps": eps})


def _once(tensor: Tensor, changed: dict[int, Tensor], change: Change) -> Tensor:
    """An argument given twice stays one tensor."""
    if id(tensor) not in changed:
        changed[id(tensor)] = change(tensor)
    return changed[id(tensor)]


def _for_host(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return None if isinstance(value, torch.Generator) else value


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def _part(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _is_operand(schema_type: str) -> bool:
    """Whether an argument is computed with, rather than a size, a position or a choice."""
    return "number" in schema_type or "Tensor" in schema_type


def _as_float32(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_as_float32(each) for each in value)
    return float(torch.tensor(value, dtype=torch.float32)) if type(value) is float else value
