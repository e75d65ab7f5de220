"""The host itself: what "device" means on a machine without accelerators."""

from __future__ import annotations

from ditorch.vendors.vendor import Look, Vendor, found


def look() -> Look:
    return found("cpu", "the host is always there")


VENDOR = Vendor("cpu", "cpu", look)
