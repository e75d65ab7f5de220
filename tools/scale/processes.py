"""What the kernel says of a job's processes."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

from dicomm.bench.quiet import TICKS_PER_S

PROC = Path("/proc")
PR_SET_CHILD_SUBREAPER = 36  # as in linux/prctl.h


def adopt_orphans() -> None:
    """Makes this process the parent of those below it whose own parents end before them.

    Their CPU time so stays that of this process and its descendants, and is not taken for others'.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(process: int, name: str) -> list[int]:
    """Returns the processes below a process whose names begin so."""
    names: dict[int, str] = {}
    children: dict[int, list[int]] = {}
    for folder in PROC.glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            before, _, fields = (folder / "stat").read_text().rpartition(")")
            names[int(folder.name)] = before.partition("(")[2]
            children.setdefault(int(fields.split()[1]), []).append(int(folder.name))
    found, below = [], [process]
    while below:
        below = [child for parent in below for child in children.get(parent, [])]
        found += [child for child in below if names[child].startswith(name)]
    return found


def cpu_s_of(process: int) -> float:
    fields = (PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / TICKS_PER_S


def threads_of(process: int) -> int:
    return len(list((PROC / str(process) / "task").iterdir()))


def descriptors_of(process: int) -> int:
    return len(list((PROC / str(process) / "fd").iterdir()))


def pipes_of(process: int) -> int:
    """Returns how many of its descriptors are ends of pipes."""
    folder = PROC / str(process) / "fd"
    return sum(os.readlink(descriptor).startswith("pipe:") for descriptor in folder.iterdir())


def memory_mib_of(process: int, sharing: int) -> float:
    """Returns what is its own, its part of segments that it shares with peers, and of all else.

    sharing: how many processes are to share all else, as libraries' pages; here it may be more.
    """
    kib: dict[str, int] = {}
    for line in (PROC / str(process) / "smaps_rollup").read_text().splitlines()[1:]:
        name, figure, _ = line.split()
        kib[name.rstrip(":")] = int(figure)
    own = kib["Private_Clean"] + kib["Private_Dirty"]
    shared = kib["Shared_Clean"] + kib["Shared_Dirty"]
    return (own + kib["Pss_Shmem"] + shared / sharing) / 1024
