"""Intel's GPUs: torch has their device built in; some have no 64-bit floating point."""

from __future__ import annotations

import torch

from ditorch.vendors.vendor import Look, Quirks, Vendor, found, not_found


def look() -> Look:
    if not torch.xpu._is_compiled():
        return not_found("this build of torch has no XPU")
    if not torch.xpu.is_available():
        return not_found("torch.xpu finds no usable GPU")
    return found("xpu", f"torch.xpu finds {torch.xpu.device_count()} GPUs")


def lacks_float64() -> bool:
    return not torch.xpu.get_device_properties().has_fp64


QUIRKS = Quirks(
    substitutes={torch.float64: torch.float32, torch.complex128: torch.complex64},
)

VENDOR = Vendor("xpu", "Intel", look, QUIRKS, has_quirks=lacks_float64)
