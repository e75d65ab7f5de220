"""The ways in which one operator can be called, and what each must keep to beyond its values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ditorch.conform.arguments import copy_to, tensors_in


class Broken(Exception):
    """The call returned, but not what this way of calling promises; the message says what."""


@dataclass(frozen=True)
class SampleCall:
    """An operator of the database with the arguments of one sample, all on one device."""

    operator: Any  # torch.testing's OpInfo
    input: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    finish: Callable[[Any], Any]  # the database's way to make a result comparable and derivable
    seed: int

    @property
    def arguments(self) -> Any:
        return self.input, self.args, self.kwargs


@dataclass(frozen=True)
class Variant:
    name: str
    exists: Callable[[Any], bool]  # for this OpInfo
    run: Callable[[SampleCall], Any]  # its results; raises what the operator raises, or Broken
    needs_gradients: bool = False


def _function(call: SampleCall) -> Any:
    return call.operator.op(call.input, *call.args, **call.kwargs)


def _method(call: SampleCall) -> Any:
    return call.operator.method_variant(call.input, *call.args, **call.kwargs)


def _in_place(call: SampleCall) -> Any:
    before = call.input.clone() if isinstance(call.input, torch.Tensor) else None
    returned = call.operator.inplace_variant(call.input, *call.args, **call.kwargs)
    if returned is not call.input and isinstance(call.input, torch.Tensor):
        raise Broken("the in-place form did not return the tensor it was given")
    return {"self": call.input, "before": before}


def dropped_write(variant: Variant, results: Any) -> str | None:
    """Explains why an in-place form's values are wrong, if they are those from before the call."""
    if variant.run is not _in_place or results["before"] is None:
        return None
    if not torch.equal(results["self"], results["before"]):
        return None
    return "the in-place form did not write: its tensor is as it was before"


def _out(call: SampleCall, prepare: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    results = _function(call)
    if not isinstance(results, torch.Tensor | tuple | list):
        raise Broken(f"returned a {type(results).__name__}, expected tensors")
    out = tree_map(prepare, results if isinstance(results, torch.Tensor) else tuple(results))
    memory = [tensor.data_ptr() for tensor in tensors_in(out)]
    sizes = [tensor.size() for tensor in tensors_in(out)]
    torch.manual_seed(call.seed)
    returned = call.operator.op(call.input, *call.args, **call.kwargs, out=out)
    given = tensors_in(out)
    if returned is not None and [id(t) for t in tensors_in(returned)] != [id(t) for t in given]:
        raise Broken("did not return the out= tensors it was given")
    for i, tensor in enumerate(given):
        if tensor.size() == sizes[i] and tensor.data_ptr() != memory[i]:
            raise Broken(f"moved the memory of out= tensor {i}")
    return out


def _out_filled(call: SampleCall) -> Any:
    return _out(call, _ones_like)


def _ones_like(result: torch.Tensor) -> torch.Tensor:
    """Filled on the host, so that no kernel runs but the operator's own."""
    return copy_to(torch.ones_like(result, device="cpu"), result.device)


def _out_empty(call: SampleCall) -> Any:
    return _out(call, lambda result: result.new_empty(0))


def _gradient(call: SampleCall) -> Any:
    """The operator's results and the gradients of its inputs, for one random cotangent."""
    results = call.finish(_function(call))
    derivable = [
        result
        for result in tensors_in(results)
        if result.requires_grad and (result.is_floating_point() or result.is_complex())
    ]
    inputs = [tensor for tensor in tensors_in(call.arguments) if tensor.requires_grad]
    if not derivable or not inputs:
        raise Broken("nothing of its result depends on an input that needs a gradient")
    generator = torch.Generator().manual_seed(call.seed)
    cotangents = [_cotangent(result, generator) for result in derivable]
    gradients = torch.autograd.grad(derivable, inputs, cotangents, allow_unused=True)
    return {"gradients": list(gradients)}


def _cotangent(result: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    wide = torch.complex128 if result.is_complex() else torch.float64
    drawn = torch.randn(result.shape, generator=generator, dtype=wide)
    return drawn.to(result.dtype).to(result.device)


VARIANTS = (
    Variant("function", lambda op: True, _function),
    Variant(
        "method",
        lambda op: op.method_variant is not None and op.method_variant is not op.op,
        _method,
    ),
    Variant("in-place", lambda op: op.inplace_variant is not None, _in_place),
    Variant("out=", lambda op: op.supports_out, _out_filled),
    Variant("out= resized", lambda op: op.supports_out, _out_empty),
    Variant("gradient", lambda op: op.supports_autograd, _gradient, needs_gradients=True),
)
