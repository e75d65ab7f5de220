"""Cores, memory, and what the system lets one process have."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from hyperhetero.doctor.findings import Finding, optional

MIB, GIB = 1 << 20, 1 << 30
SHARED_MEMORY = Path("/dev/shm")
MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
QUICKSTART_CORES, QUICKSTART_BYTES = 2, 6 * GIB
SHARED_BYTES = 64 << 20  # a container's usual /dev/shm, enough for a node's ranks to start
OPEN_FILES = 4096  # sockets, rings and queue pairs of one rank among several hundred


def cores() -> Finding:
    count = len(os.sched_getaffinity(0))
    few = "emulated chips share a core, and take turns: an emulated run is slow, and not timed well"
    return optional("cores", count >= QUICKSTART_CORES, str(count), few)


def memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in MEMORY_LIMITS:
        limit = Path(name)
        if limit.is_file() and (text := limit.read_text().strip()).isdigit():
            total = min(total, int(text))
    return optional(
        "memory",
        total >= QUICKSTART_BYTES,
        f"{total / GIB:.1f} GiB",
        f"the quickstart's six ranks need about {QUICKSTART_BYTES // GIB} GiB",
    )


def shared_memory() -> Finding:
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        found, free_bytes = f"{SHARED_MEMORY}: {error.strerror}", 0
    else:
        free_bytes = status.f_bavail * status.f_frsize
        total_bytes = status.f_blocks * status.f_frsize
        unit, unit_bytes = ("GiB", GIB) if total_bytes >= GIB else ("MiB", MIB)
        found = f"{free_bytes / unit_bytes:.1f} of {total_bytes / unit_bytes:.1f} {unit} free"
    return optional(
        str(SHARED_MEMORY),
        free_bytes >= SHARED_BYTES,
        found,
        "ranks of one machine may not start, and data loaders' workers fail: "
        "mount -o remount,size=1g /dev/shm, or docker run --shm-size 1g",
    )


def memory_lock() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = limit == resource.RLIM_INFINITY
    return optional(
        "locked memory",
        unlimited or os.geteuid() == 0,
        "unlimited" if unlimited else f"{limit / MIB:.1f} MiB",
        "RDMA cannot register larger buffers: ulimit -l unlimited",
    )


def open_files() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    here = limit == resource.RLIM_INFINITY or limit >= OPEN_FILES
    cost = f"a rank that talks to several hundred others may run out: ulimit -n {OPEN_FILES}"
    return optional("open files", here, str(limit), cost)
