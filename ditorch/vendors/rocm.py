"""AMD's GPUs: torch has their device built in and calls it cuda too."""

from __future__ import annotations

import torch

from ditorch.vendors.vendor import Look, Vendor, found, not_found


def look() -> Look:
    if torch.version.hip is None:
        return not_found("this build of torch has no ROCm")
    if not torch.cuda.is_available():
        return not_found("torch.cuda, which is ROCm's here, finds no usable GPU")
    return found("cuda", f"torch.cuda, which is ROCm's here, finds {torch.cuda.device_count()}")


VENDOR = Vendor("rocm", "AMD", look)
