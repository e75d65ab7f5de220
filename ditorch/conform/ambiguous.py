"""Results of which several are right: which of equal values was chosen, a vector's phase."""

from __future__ import annotations

from typing import Any

import torch

from ditorch.conform.agree import disagreement, is_identical
from ditorch.conform.arguments import tensors_in
from ditorch.conform.variants import SampleCall

_DIM_AT = {"argsort": 0, "sort": 0, "topk": 1, "kthvalue": 1}
"""Operators that return where values are, most of them after the values -> the place of `dim` among
their arguments.
"""

_UP_TO_PHASE = {"linalg.eig", "linalg.eigh"}
"""Operators whose vectors the database makes comparable, as their signs are free."""


def is_as_right(actual: Any, expected: Any, dtype: torch.dtype, call: SampleCall) -> bool:
    """Whether the chip's results are another right answer than the CPU's.

    `actual` and `expected` are results of equal form, on the host.
    """
    name = call.operator.name
    found, wanted = tensors_in(actual), tensors_in(expected)
    if name in _DIM_AT and found and call.input.dim() and not call.kwargs.get("stable"):
        values = found[0] if len(found) == 2 else _at(wanted[0], call)
        agree = len(found) == 1 or is_identical(found[0], wanted[0])
        return agree and _were_there(values, found[-1], call)
    if name in _UP_TO_PHASE and len(found) == 2:
        pairs = zip(call.finish(tuple(found)), call.finish(tuple(wanted)), strict=True)
        return not any(disagreement(got, want, dtype) for got, want in pairs)
    return False


def _were_there(values: torch.Tensor, indices: torch.Tensor, call: SampleCall) -> bool:
    """Whether the input has the values at the indices, each of them named once."""
    dim = _dim(call)
    if indices.dim() < call.input.dim():  # without keepdim
        values, indices = values.unsqueeze(dim), indices.unsqueeze(dim)
    if not is_identical(_at(indices, call), values):
        return False
    return not (indices.sort(dim).values.diff(dim=dim) == 0).any()


def _at(indices: torch.Tensor, call: SampleCall) -> torch.Tensor:
    return call.input.detach().take_along_dim(indices, _dim(call))


def _dim(call: SampleCall) -> int:
    at = _DIM_AT[call.operator.name]
    return call.kwargs.get("dim", call.args[at] if len(call.args) > at else -1)
