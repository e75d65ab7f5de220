"""NVIDIA's and AMD's GPUs: torch has their device already, under the name cuda."""

from __future__ import annotations

import torch

from ditorch.vendors import Vendor


def is_there() -> bool:
    return torch.cuda.is_available()


def find() -> Vendor:
    """Raises ImportError if torch sees no GPU."""
    if not is_there():
        raise ImportError("DITORCH_VENDOR is 'cuda' but torch.cuda finds no usable GPU")
    return Vendor(name="cuda", device_type="cuda")
