"""How quiet the machine was while something was measured."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
SPINS = 20_000
LOUD = "NOT QUIET"


@dataclass(frozen=True)
class Quiet:
    """How much others disturbed a measurement.

    others_percent: how much of the machine's CPU time was taken by processes that are not the
    benchmark's, and by other guests of the host. spin_median, spin_worst: the time of a fixed piece
    of work, in the median and at worst, divided by its best time.
    """

    others_percent: float
    spin_median: float
    spin_worst: float

    @property
    def is_quiet(self) -> bool:
        return self.others_percent < 5 and self.spin_median < 1.1

    @property
    def sentence(self) -> str:
        verdict = "quiet" if self.is_quiet else LOUD
        return (
            f"{verdict}: others took {self.others_percent:.1f}% of its CPU, a fixed piece of work "
            f"took {self.spin_median:.2f} of its best time (median), {self.spin_worst:.2f} (worst)"
        )


def worst(several: Sequence[Quiet]) -> Quiet | None:
    """Returns the worst of each figure over several parts of a run; None if there are no parts."""
    if not several:
        return None
    return Quiet(
        max(quiet.others_percent for quiet in several),
        max(quiet.spin_median for quiet in several),
        max(quiet.spin_worst for quiet in several),
    )


class Watch:
    """Watches the machine until `result()`; call `spin()` now and then, between measurements."""

    def __init__(self) -> None:
        self._machine_s, self._busy_s = _machine_cpu_s()
        self._own_s = own_cpu_s()
        self._spins_s: list[float] = []

    def spin(self) -> None:
        start = time.perf_counter()
        for _ in range(SPINS):
            pass
        self._spins_s.append(time.perf_counter() - start)

    def result(self) -> Quiet:
        """Returns the figures since the watch began. Call it before the measured processes end.

        The CPU time of a process that has ended would count as time that others took.
        """
        machine_s, busy_s = _machine_cpu_s()
        total_s = max(machine_s - self._machine_s, 1 / TICKS_PER_S)
        others_s = max(0.0, busy_s - self._busy_s - (own_cpu_s() - self._own_s))
        for _ in range(3):
            self.spin()
        best_s = min(self._spins_s)
        return Quiet(
            100 * others_s / total_s,
            statistics.median(self._spins_s) / best_s,
            max(self._spins_s) / best_s,
        )


def _machine_cpu_s() -> tuple[float, float]:
    """All CPU time of the machine so far, and that of it in which it was busy or not ours."""
    user, nice, system, idle, iowait, irq, softirq, steal = (
        int(field) / TICKS_PER_S for field in Path("/proc/stat").read_text().split()[1:9]
    )
    busy = user + nice + system + irq + softirq + steal
    return busy + idle + iowait, busy


def own_cpu_s() -> float:
    """CPU time of this process, its descendants, and those of them that have ended."""
    parents: dict[int, int] = {}
    times_s: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        pid = int(entry.name)
        parents[pid] = int(fields[1])
        times_s[pid] = sum(int(field) for field in fields[11:15]) / TICKS_PER_S
    me = os.getpid()
    return sum(spent_s for pid, spent_s in times_s.items() if _descends(pid, me, parents))


def _descends(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        if pid == ancestor:
            return True
        pid = parents[pid]
    return False
