"""Any OpenCL device with shared virtual memory, which DITORCH_VENDOR=opencl alone chooses."""

from __future__ import annotations

import os
from pathlib import Path

from ditorch.vendors.vendor import Look, Vendor, not_found

_LIBRARY = Path(__file__).resolve().parents[1] / "lib" / "libditorch_opencl.so"


def look() -> Look:
    """Never found unasked: a GPU has a better vendor than OpenCL, and a processor is one itself."""
    if not _LIBRARY.is_file():
        return not_found(
            f"{_LIBRARY} is not built; install an OpenCL driver and its headers "
            "(tools/packages opencl), then ditorch"
        )
    if os.environ.get("DITORCH_VENDOR") != VENDOR.name:
        return not_found("its library is here, and DITORCH_VENDOR=opencl chooses it")
    return Look("found", "DITORCH_VENDOR names it", library=_LIBRARY, asked=True)


VENDOR = Vendor("opencl", "any", look)
