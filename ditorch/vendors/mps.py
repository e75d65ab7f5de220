"""Apple's GPUs: torch has their device built in; Metal has no 64-bit floating point."""

from __future__ import annotations

import torch

from ditorch.vendors.vendor import Look, Quirks, Vendor, found, not_found


def look() -> Look:
    if not torch.backends.mps.is_built():
        return not_found("this build of torch has no MPS")
    if not torch.backends.mps.is_available():
        return not_found("torch.mps finds no usable GPU")
    return found("mps", "torch.mps finds a GPU")


QUIRKS = Quirks(
    substitutes={torch.float64: torch.float32, torch.complex128: torch.complex64},
)

VENDOR = Vendor("mps", "Apple", look, QUIRKS)
