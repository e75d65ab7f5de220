"""Results of which several are right: which of equal values was chosen, a vector's phase."""

from __future__ import annotations

from typing import Any

import torch

from ditorch.conform.agree import disagreement, is_identical
from ditorch.conform.arguments import tensors_in
from ditorch.conform.variants import SampleCall

_DIM_AT = {"sort": 0, "topk": 1, "kthvalue": 1}
"""Operators that return values and where they found them -> the place of their argument `dim`."""

_UP_TO_PHASE = {"linalg.eig", "linalg.eigh"}
"""Operators whose vectors the database makes comparable, as their signs are free."""


def is_as_right(actual: Any, expected: Any, dtype: torch.dtype, call: SampleCall) -> bool:
    """Whether the chip's results are another right answer than the CPU's.

    `actual` and `expected` are results of equal form, on the host.
    """
    name = call.operator.name
    found, wanted = tensors_in(actual), tensors_in(expected)
    if name in _DIM_AT and len(found) == 2 and not call.kwargs.get("stable"):
        return is_identical(found[0], wanted[0]) and _were_there(found[0], found[1], call)
    if name in _UP_TO_PHASE and len(found) == 2:
        pairs = zip(call.finish(tuple(found)), call.finish(tuple(wanted)), strict=True)
        return not any(disagreement(got, want, dtype) for got, want in pairs)
    return False


def _were_there(values: torch.Tensor, indices: torch.Tensor, call: SampleCall) -> bool:
    """Whether the input has the values at the indices, each of them named once."""
    given, at = call.input, _DIM_AT[call.operator.name]
    if given.dim() == 0:
        return False
    dim = call.kwargs.get("dim", call.args[at] if len(call.args) > at else -1)
    if values.dim() < given.dim():  # without keepdim
        values, indices = values.unsqueeze(dim), indices.unsqueeze(dim)
    if not is_identical(given.detach().take_along_dim(indices, dim), values):
        return False
    return not (indices.sort(dim).values.diff(dim=dim) == 0).any()
