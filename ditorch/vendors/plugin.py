"""Vendors whose device comes with a plugin of torch's, which takes its one PrivateUse1 place.

A plugin that is not installed is no news; one that is installed and does not import is.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

import torch

from ditorch.vendors.vendor import Look, found, not_found


def place_taken_by() -> str:
    """The device type that owns PrivateUse1, or the empty string."""
    name: str = torch._C._get_privateuse1_backend_name()
    return "" if name == "privateuseone" else name


def is_our_own(device_type: str) -> bool:
    """Whether ditorch made the device from a vendor's library."""
    ours = sys.modules.get("ditorch.device_module")
    return ours is not None and getattr(torch, device_type, None) is ours


def look_for(package: str, device_type: str) -> Look:
    """Imports `package`, if it is installed, and asks torch.<device_type> for a chip."""
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        return not_found(f"{package} is not installed")
    if (taken := place_taken_by()) not in ("", device_type):
        return not_found(
            f"torch has one place for a plugin's device and {taken!r} has it in this process, "
            f"so {package} cannot be imported"
        )
    try:
        importlib.import_module(package)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return Look("broken", f"{package} is installed but does not import ({reason})")
    module = getattr(torch, device_type, None)
    if module is None:
        return Look("broken", f"{package} was imported but there is no torch.{device_type}")
    if not module.is_available():
        return not_found(f"{package} is installed but finds no chip")
    return found(device_type, f"{package} drives {module.device_count()} of them")
