"""NICs and chips, as the system's own files show them."""

from __future__ import annotations

from ctypes.util import find_library
from pathlib import Path

from hyperhetero.doctor.findings import Finding, optional

CHIPS = {  # files that a vendor's driver makes for each chip
    "NVIDIA": "/dev/nvidia[0-9]*",
    "AMD": "/sys/bus/pci/drivers/amdgpu/0*",
    "Ascend": "/dev/davinci[0-9]*",
    "Cambricon": "/dev/cambricon_dev[0-9]*",
    "Moore Threads": "/dev/mtgpu.[0-9]*",
    "Gaudi": "/dev/accel/accel[0-9]*",
}


def rdma() -> Finding:
    library = find_library("ibverbs")
    ports = sorted(Path("/sys/class/infiniband").glob("*/ports/*/state"))
    active = [port for port in ports if "ACTIVE" in port.read_text()]
    if not ports:
        found = "no NIC"
    else:
        names = sorted({port.parts[4] for port in active})
        found = f"{len(active)} of {len(ports)} ports active" + f" ({', '.join(names)})" * bool(
            names
        )
    if not library:
        found += ", no libibverbs"
    return optional(
        "RDMA",
        bool(active and library),
        found,
        "messages between machines go over TCP: slower, and through the processor",
    )


def gpus() -> Finding:
    counts = {
        vendor: len(list(Path("/").glob(pattern.lstrip("/")))) for vendor, pattern in CHIPS.items()
    }
    found = ", ".join(f"{count} of {vendor}" for vendor, count in counts.items() if count)
    return optional(
        "chips", bool(found), found or "none", "chips are emulated: runs show what happens, slowly"
    )


def opencl() -> Finding:
    loader = find_library("OpenCL")
    drivers = sorted(path.stem for path in Path("/etc/OpenCL/vendors").glob("*.icd"))
    found = ", ".join(drivers) or "no driver"
    if not loader:
        found += ", no libOpenCL"
    return optional(
        "OpenCL", bool(loader and drivers), found, "ditorch opens no OpenCL device as a chip"
    )
