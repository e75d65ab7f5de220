"""Which vendor's chip this process drives: one small file for each vendor.

A vendor either has a library that speaks ditorch's two C ABIs (`csrc/ditorch/abi`), and ditorch
makes its torch device; or torch has its device already, and ditorch adopts it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Vendor:
    """One of `library` and `device_type` is set."""

    name: str
    library: Path | None = None  # speaks the two ABIs; ditorch makes its device
    device_type: str | None = None  # a device torch already has


def find_vendor() -> Vendor:
    """Chooses by DITORCH_VENDOR_LIBRARY, DITORCH_VENDOR, DITORCH_CHIP, else by what is there.

    Raises:
        ImportError: what was asked for is not there; one sentence.
    """
    from ditorch.vendors import cpu, cuda, emuchip

    if library := os.environ.get("DITORCH_VENDOR_LIBRARY"):
        return Vendor(name=Path(library).stem.removeprefix("lib"), library=_existing(library))
    by_name = {"emuchip": emuchip.find, "cuda": cuda.find, "cpu": cpu.find}
    if wanted := os.environ.get("DITORCH_VENDOR"):
        if wanted not in by_name:
            raise ImportError(
                f"DITORCH_VENDOR is {wanted!r}, expected one of {', '.join(by_name)}; a vendor "
                "that ditorch does not know is given by DITORCH_VENDOR_LIBRARY=<its library>"
            )
        return by_name[wanted]()
    if emuchip.is_wanted():
        return emuchip.find()
    return cuda.find() if cuda.is_there() else cpu.find()


def _existing(library: str) -> Path:
    path = Path(library)
    if not path.is_file():
        raise ImportError(f"DITORCH_VENDOR_LIBRARY is {library!r}, which is not a file")
    return path.resolve()
