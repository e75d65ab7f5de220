"""Which vendor the environment asks for: by its name, or by the chip that drives it."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Wanted:
    vendor: str
    because: str  # half a sentence


def wanted() -> Wanted | None:
    """Returns what DITORCH_VENDOR names, else the driver in the file of DITORCH_CHIP, if any."""
    if vendor := os.environ.get("DITORCH_VENDOR"):
        return Wanted(vendor, f"DITORCH_VENDOR is {vendor!r}")
    if chip := os.environ.get("DITORCH_CHIP"):
        from ditorch.chips import load_chip

        try:
            driver = load_chip(chip).driver
        except (ValueError, OSError):  # which the emulated chip's file says
            return None
        if driver:
            return Wanted(driver, f"the driver of DITORCH_CHIP {chip!r} is {driver!r}")
    return None
