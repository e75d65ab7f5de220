"""The unified name where torch compares device names in Python, not in C++.

torch's C++ reads "device" through one constructor (csrc/ditorch/runtime/unified_name.cpp). A few
Python functions look a device type up by its name first; those are given the honest one.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

_honest: dict[str, str] = {}


def accept(name: str, device: torch.device) -> None:
    """Makes `name` ("device" or "cuda") mean `device` in these Python functions too."""
    if not _honest:
        _translate_first_argument(torch.amp.autocast_mode.autocast, "device_type")
        _translate_first_argument(torch.amp.grad_scaler.GradScaler, "device")
        if torch.distributed.is_available():
            from torch.distributed.device_mesh import DeviceMesh

            _translate_first_argument(DeviceMesh, "device_type")
    _honest[name] = device.type


def _translate_first_argument(kind: type, argument: str) -> None:
    """Makes kind("device", ...) and kind(<argument>="device", ...) see the honest type."""
    construct: Any = kind.__init__  # type: ignore[misc]

    @functools.wraps(construct)
    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        if arguments:
            arguments = (_translate(arguments[0]), *arguments[1:])
        elif argument in named:
            named[argument] = _translate(named[argument])
        construct(self, *arguments, **named)

    setattr(kind, "__init__", __init__)  # noqa: B010


def _translate(name: Any) -> Any:
    return _honest.get(name, name) if isinstance(name, str) else name
