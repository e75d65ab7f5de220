"""The CPU errs too: how far it and the chip are from the same sample in double precision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ditorch.conform.agree import same_specials
from ditorch.conform.arguments import copy_to, tensors_in
from ditorch.conform.variants import SampleCall, Variant

_RATIO = 2.0  # the chip's largest error may be this many times the CPU's

_WIDE = {
    torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64,
    torch.complex32: torch.complex128, torch.complex64: torch.complex128,
}  # fmt: skip


def errs_like_cpu(actual: Any, expected: Any, variant: Variant, call: SampleCall) -> bool:
    """Whether the chip's results are as near as the CPU's to those in double precision.

    `actual` and `expected` are the chip's and the CPU's results, of equal form, on the host. False
    where double precision cannot tell: other dtypes, or a call that does not run in it.
    """
    try:
        exact = _run_in_double(variant, call)
    except Exception:
        return False
    found, wanted, right = tensors_in(actual), tensors_in(expected), tensors_in(exact)
    return len(right) == len(wanted) and all(map(_errs_like, found, wanted, right))


def _run_in_double(variant: Variant, call: SampleCall) -> Any:
    def widen(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype not in _WIDE:
            return value
        return value.detach().to(_WIDE[value.dtype]).requires_grad_(value.requires_grad)

    first, args, kwargs = tree_map(widen, copy_to(call.arguments, torch.device("cpu")))
    torch.manual_seed(call.seed)
    results = variant.run(replace(call, input=first, args=args, kwargs=kwargs))
    return copy_to(results, torch.device("cpu"))


def _errs_like(actual: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor) -> bool:
    if expected.dtype not in _WIDE:
        return torch.equal(actual, expected)
    if exact.dtype != _WIDE[expected.dtype] or exact.shape != expected.shape:
        return False
    if not same_specials(actual, expected):
        return False
    finite = torch.isfinite(expected.to(exact.dtype)) & torch.isfinite(exact)
    chip = (actual.to(exact.dtype) - exact)[finite].abs()
    cpu = (expected.to(exact.dtype) - exact)[finite].abs()
    return chip.numel() == 0 or bool(chip.max() <= _RATIO * cpu.max())
