"""The emulated chip that comes with ditorch; DITORCH_CHIP says which one it emulates."""

from __future__ import annotations

import os
from pathlib import Path

from ditorch.vendors import Vendor

_LIBRARY = Path(__file__).resolve().parents[1] / "lib" / "libemuchip.so"


def is_wanted() -> bool:
    return bool(os.environ.get("DITORCH_CHIP") or os.environ.get("EMUCHIP_CHIP"))


def find() -> Vendor:
    """Names the chip file to the library, which reads EMUCHIP_CHIP.

    Raises:
        ImportError: no chip is named, its file is malformed, or the library is not built.
    """
    if chip := os.environ.get("DITORCH_CHIP"):
        os.environ["EMUCHIP_CHIP"] = str(_chip_file(chip))
    elif not os.environ.get("EMUCHIP_CHIP"):
        raise ImportError(
            "DITORCH_VENDOR is 'emuchip' but no chip is named: set DITORCH_CHIP to a preset such "
            "as 'b-mini' or to the path of a chip file"
        )
    if not _LIBRARY.is_file():
        raise ImportError(f"{_LIBRARY} is not built; install ditorch with its C++ parts")
    return Vendor(name="emuchip", library=_LIBRARY)


def _chip_file(chip: str) -> Path:
    from ditorch.chips import load_chip

    try:
        path = load_chip(chip).path
    except (ValueError, OSError) as error:
        raise ImportError(f"DITORCH_CHIP is {chip!r}: {error}") from None
    return Path(path).resolve()
