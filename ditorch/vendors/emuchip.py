"""The emulated chip that comes with ditorch; DITORCH_CHIP says which one it emulates."""

from __future__ import annotations

import os
from pathlib import Path

from ditorch.vendors.vendor import Look, Vendor, not_found

_LIBRARY = Path(__file__).resolve().parents[1] / "lib" / "libemuchip.so"


def look() -> Look:
    """Names the chip file to the library, which reads EMUCHIP_CHIP."""
    chip = os.environ.get("DITORCH_CHIP")
    if not chip and not os.environ.get("EMUCHIP_CHIP"):
        return not_found(
            "no chip is named: set DITORCH_CHIP to a preset such as 'b-mini' or to the path of a "
            "chip file"
        )
    if chip:
        from ditorch.chips import load_chip

        try:
            spec = load_chip(chip)
        except (ValueError, OSError) as error:
            return Look("broken", f"DITORCH_CHIP is {chip!r}: {error}", asked=True)
        if spec.driver:
            return not_found(f"DITORCH_CHIP is {chip!r}, a real chip that {spec.driver} drives")
        os.environ["EMUCHIP_CHIP"] = str(spec.path.resolve())
    if not _LIBRARY.is_file():
        why = f"{_LIBRARY} is not built; install ditorch with its C++ parts"
        return Look("broken", why, asked=True)
    os.environ.setdefault("EMUCHIP_DEVICES", _chips_of_the_node())
    named_by = "DITORCH_CHIP" if chip else "EMUCHIP_CHIP"
    return Look("found", f"{named_by} names its chip", library=_LIBRARY, asked=True)


def _chips_of_the_node() -> str:
    """Returns how many chips this node has: under torchrun one for each rank on it, else 1.

    As on a node of GPUs, each process sees all of them and uses one: set_device(LOCAL_RANK) finds
    it. There are 64 at most.
    """
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return ranks if ranks.isdigit() and 1 <= int(ranks) <= 64 else "1"


VENDOR = Vendor("emuchip", "emulated", look)
