"""How large what an operator adds up is: rounding errors are relative to that, not to the result.

Where terms cancel, a result is small and its error is not. Three ways tell the magnitude: from the
operator's definition (`terms.py`); for a sum of products, the same operator of its inputs'
magnitudes (|A| @ |B|); for any other, how far its results move when its inputs move a little.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ditorch.precision.call import Call
from ditorch.precision.definitions import Results, Run, argument, attention_backward_terms
from ditorch.precision.standards import operator_names
from ditorch.precision.tensors import inputs, map_tensors
from ditorch.precision.terms import TERMS

_STEP = 2.0**-20  # relative movement of inputs: small to the function, large to float64's rounding
_DRAWS = 4
_SUMS = ("add", "sub", "subtract", "rsub")
_ONE_ROUNDING = ("mul", "multiply", "div", "divide", "true_divide", "reciprocal", "sqrt", "square")
_ACTIVATIONS = ("gelu", "silu", "mish", "elu", "softplus", "sigmoid", "glu", "hardswish")


def is_rounded_once(call: Call, dtype: torch.dtype) -> bool:
    """Whether IEEE arithmetic in `dtype` rounds the exact result, and nothing else."""
    name = operator_names(call.operator)[-1]
    same = all(tensor.dtype is dtype for _, tensor in inputs(call) if _moves(tensor))
    if dtype.is_complex or not same or not _are_exact(call.args[1:], dtype):
        return False
    if name in _SUMS:
        return argument(call, "alpha") in (None, 1)
    return name in _ONE_ROUNDING and argument(call, "rounding_mode") is None


def scale_from_definition(call: Call) -> Results | None:
    name = call.operator.split(".")[1]
    is_attention_backward = "_scaled_dot_product_" in name and name.endswith("_backward")
    is_attention_backward &= not argument(call, "dropout_p")
    terms = attention_backward_terms if is_attention_backward else TERMS.get(name)
    return None if terms is None else terms(call)


def scale_of_terms(call: Call, run: Run) -> Results:
    """`call` has float64 inputs; `run` computes an operator from such."""
    args, kwargs = map_tensors((call.args, call.kwargs), _magnitude)
    args = tuple(_magnitude_of_number(value) for value in args)
    kwargs = {key: _magnitude_of_number(value) for key, value in kwargs.items()}
    return run(replace(call, args=args, kwargs=kwargs))


def sensitivity(call: Call, run: Run) -> Results:
    """|results' movement| / |inputs' relative movement|, summed over the tensor arguments.

    Each element of an argument moves at random: how far a sum then moves is the root of the sum of
    squares of its terms. The furthest of a few draws is taken, as movements may cancel in one.
    """
    before = run(call)
    total: Results = {name: torch.zeros_like(each.abs()) for name, each in before.items()}
    generator = torch.Generator().manual_seed(0)
    for moved in dict.fromkeys(name.split(".")[0] for name, each in inputs(call) if _moves(each)):
        furthest: Results = {}
        for draw in range(_DRAWS):
            after = run(_move(call, moved, draw % 2 == 0, generator))
            for name, each in before.items():
                step = (after[name] - each).abs().nan_to_num(0.0, 0.0, 0.0) / _STEP
                furthest[name] = torch.maximum(furthest[name], step) if name in furthest else step
        total = {name: each + furthest[name] for name, each in total.items()}
    if any(part in call.operator for part in _ACTIVATIONS):
        _add_arguments(call, total)
    return total


def _move(call: Call, moved: str, all_as_far: bool, generator: torch.Generator) -> Call:
    chosen = {id(each) for name, each in inputs(call) if name.split(".")[0] == moved}

    def change(tensor: Tensor) -> Tensor:
        if id(tensor) not in chosen or not _moves(tensor):
            return tensor
        step = 2 * torch.rand(tensor.shape, generator=generator, dtype=torch.float64) - 1
        return tensor * (1 + _STEP * (step.sign() if all_as_far else 1.5 * step))

    args, kwargs = map_tensors((call.args, call.kwargs), change)
    return replace(call, args=args, kwargs=kwargs)


def _add_arguments(call: Call, total: Results) -> None:
    """Activations add numbers near 1 to functions of x: where they cancel, x's magnitude tells."""
    scale, *others = [each.abs() for _, each in inputs(call) if _moves(each)]
    for each in others:
        each = each if each.shape == scale.shape else each.amax()  # a gated unit's is twice as long
        scale = scale * (1 + each)
    for name, each in total.items():
        same = scale.shape == each.shape
        total[name] = each + (scale if same else scale.amax()).nan_to_num(0.0, 0.0, 0.0)


def _moves(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _magnitude(tensor: Tensor) -> Tensor:
    return tensor.abs() if _moves(tensor) else tensor


def _magnitude_of_number(value: Any) -> Any:
    return abs(value) if type(value) in (float, complex) else value


def _are_exact(values: Any, dtype: torch.dtype) -> bool:
    """Whether the numbers among the values are numbers of the dtype too."""
    if isinstance(values, (list, tuple)):
        return all(_are_exact(each, dtype) for each in values)
    if type(values) is not float:
        return True
    return torch.tensor(values, dtype=dtype).item() == values or values != values
