"""What an adopted device says of its chip, through the module its plugin gives torch."""

from __future__ import annotations

from typing import Any

import torch


def current_index(device_type: str) -> int:
    module: Any = torch.get_device_module(device_type)
    return int(module.current_device()) if hasattr(module, "current_device") else 0  # mps


def chip_type(device: torch.device) -> str:
    module: Any = torch.get_device_module(device)
    if hasattr(module, "get_device_name"):
        return str(module.get_device_name(device.index))
    return device.type  # mps has one chip and no name for it


def memory_bytes(device: torch.device) -> int | None:
    """Returns None where the plugin has no way to say."""
    module: Any = torch.get_device_module(device)
    if hasattr(module, "get_device_properties"):
        total = getattr(module.get_device_properties(device.index), "total_memory", None)
        if total is not None:
            return int(total)
    if hasattr(module, "mem_get_info"):
        return int(module.mem_get_info(device.index)[1])
    if hasattr(module, "recommended_max_memory"):  # mps shares the host's memory
        return int(module.recommended_max_memory())
    return None
