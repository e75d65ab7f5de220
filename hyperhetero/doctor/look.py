"""Everything that the doctor looks at, in the order in which it is told."""

from __future__ import annotations

from hyperhetero.doctor.devices import gpus, opencl, rdma
from hyperhetero.doctor.findings import Finding
from hyperhetero.doctor.limits import cores, memory, memory_lock, open_files, shared_memory
from hyperhetero.doctor.programs import browser, compiler, scheduler, ssh
from hyperhetero.doctor.software import extras, libcrypto, libraries, packages, python


def look() -> list[Finding]:
    """Looks at this machine; this process imports neither torch nor ditorch."""
    checks = (
        *(python, packages, libraries, extras, libcrypto),
        *(cores, memory, shared_memory, memory_lock, open_files),
        *(rdma, gpus, opencl),
        *(compiler, ssh, scheduler, browser),
    )
    return [check() for check in checks]
