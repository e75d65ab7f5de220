"""The host itself: what "device" means on a machine without accelerators."""

from __future__ import annotations

from ditorch.vendors import Vendor


def find() -> Vendor:
    return Vendor(name="cpu", device_type="cpu")
