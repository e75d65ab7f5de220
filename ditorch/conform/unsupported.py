"""When a sample asks for what a device does not claim to have, and the reasons we give."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import torch

import ditorch
from ditorch.conform.arguments import tensors_in

_SPARSE = "sparse, quantized and nested tensors: the device holds dense ones only"

_REFUSALS = (
    (r"holds dense tensors only|Sparse\w*PrivateUse1|Quantized\w*|Nested\w*", _SPARSE),
    (r"not implemented for|NotImplementedError|could not run .* with arguments from"
     r"|not supported for|Tensor is not supported", "the vendor has no kernel for it"),
)  # fmt: skip


def without_device_form(tree: Any, dtype: torch.dtype) -> str | None:
    """Why arguments or results such as the CPU's cannot be on the device; None if they can."""
    for tensor in tensors_in(tree):
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            return _SPARSE
    return _missing_dtype(dtype)


@cache
def _missing_dtype(dtype: torch.dtype) -> str | None:
    try:
        torch.zeros(2, dtype=dtype).to(ditorch.device)
    except (RuntimeError, TypeError):
        return f"the device has no {str(dtype).removeprefix('torch.')}"
    return None


def why_unsupported(error: Exception) -> str | None:
    """The reason, if the error is the vendor's word that it has no such thing."""
    for pattern, reason in _REFUSALS:
        if re.search(pattern, str(error), re.IGNORECASE) or (
            isinstance(error, NotImplementedError) and reason != _SPARSE
        ):
            return reason
    return None
