"""Any vendor whose library implements ditorch's two C ABIs (`csrc/ditorch/abi`)."""

from __future__ import annotations

import os
from pathlib import Path

from ditorch.vendors.vendor import Look, Vendor, not_found


def look() -> Look:
    library = os.environ.get("DITORCH_VENDOR_LIBRARY")
    if not library:
        return not_found("DITORCH_VENDOR_LIBRARY names no library")
    path = Path(library)
    if not path.is_file():
        why = f"DITORCH_VENDOR_LIBRARY is {library!r}, which is not a file"
        return Look("broken", why, asked=True)
    name = path.stem.removeprefix("lib")
    why = "DITORCH_VENDOR_LIBRARY names it"
    return Look("found", why, library=path.resolve(), name=name, asked=True)


VENDOR = Vendor("library", "any", look)
