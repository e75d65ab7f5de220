"""Any other plugin that this process has imported: its device is adopted under its own name."""

from __future__ import annotations

import torch

from ditorch.vendors.plugin import is_our_own, place_taken_by
from ditorch.vendors.vendor import Look, Vendor, found, not_found


def look() -> Look:
    name = place_taken_by()
    if not name:
        return not_found("no plugin has registered a device with torch")
    if is_our_own(name):
        return not_found(f"ditorch's own device {name!r} has torch's place for a plugin's device")
    module = getattr(torch, name, None)
    if module is None:
        return Look("broken", f"the plugin that calls its device {name!r} has no torch.{name}")
    if not module.is_available():
        return not_found(f"the plugin that made the device {name!r} finds no chip")
    return found(name, f"an imported plugin made the device {name!r}", name=name)


VENDOR = Vendor("privateuse1", "any", look)
