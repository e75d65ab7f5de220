"""safetensors reads tensors straight to a device, but knows devices by a list of names.

The list lacks this process's device, be it by its unified or by its honest name. A number stands
for "the accelerator with this index" there, so that is what such names become.
"""

from __future__ import annotations

import functools
from typing import Any

import safetensors
import safetensors.torch
import torch


def accept(device: torch.device) -> None:
    """Makes safe_open(device=...) and load_file(device=...) take any name of `device`."""
    original = safetensors.safe_open

    @functools.wraps(original)
    def safe_open(filename: Any, framework: Any, device: Any = "cpu", **options: Any) -> Any:
        return original(filename, framework, _known(device, ours), **options)

    ours = device
    for module in (safetensors, safetensors.torch):
        module.__dict__["safe_open"] = safe_open


def _known(name: Any, ours: torch.device) -> Any:
    if not isinstance(name, str | torch.device):
        return name
    try:
        meant = torch.device(name)
    except RuntimeError:
        return name  # safetensors says what it thinks of it
    if meant.type != ours.type:
        return str(name)
    if ours.type == "cpu":
        return "cpu"
    return ours.index if meant.index is None else meant.index
