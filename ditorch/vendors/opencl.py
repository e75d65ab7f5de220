"""Any OpenCL device with shared virtual memory, which is chosen by its name alone."""

from __future__ import annotations

from pathlib import Path

from ditorch.vendors.vendor import Look, Vendor, not_found
from ditorch.vendors.wanted import wanted

_LIBRARY = Path(__file__).resolve().parents[1] / "lib" / "libditorch_opencl.so"


def look() -> Look:
    """Never found unasked: a GPU has a better vendor than OpenCL, and a processor is one itself."""
    if not _LIBRARY.is_file():
        return not_found(
            f"{_LIBRARY} is not built; install an OpenCL driver and its headers "
            "(tools/packages opencl), then ditorch"
        )
    named = wanted()
    if named is None or named.vendor != VENDOR.name:
        return not_found("its library is here, and DITORCH_VENDOR=opencl chooses it")
    return Look("found", named.because, library=_LIBRARY, asked=True)


VENDOR = Vendor(
    "opencl",
    "any",
    look,
    advice="PoCL drives this machine's processors: Debian's pocl-opencl-icd, which "
    "tools/packages opencl installs",
)
