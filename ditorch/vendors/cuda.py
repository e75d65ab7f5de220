"""NVIDIA's GPUs: torch has their device built in."""

from __future__ import annotations

import torch

from ditorch.vendors.vendor import Look, Vendor, found, not_found


def look() -> Look:
    if torch.version.cuda is None:
        return not_found("this build of torch has no CUDA")
    if not torch.cuda.is_available():
        return not_found("torch.cuda finds no usable GPU")
    return found("cuda", f"torch.cuda finds {torch.cuda.device_count()} GPUs")


VENDOR = Vendor("cuda", "NVIDIA", look)
