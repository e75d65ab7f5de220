"""How a rank's costs grow with the job: a law from jobs of several sizes.

It is a + b * log2(ranks), by least squares, and says what a rank has in a job that no machine here
holds. How well it holds shows at the largest job: the law of the smaller ones says what that should
have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from evidence import Row, row

from scale.sizes import MANY

MOST_OVER_LAW = 1.15  # times what the law of the smaller jobs says of the largest
MOST_START_S = 10.0  # of communication

Series = Mapping[int, Mapping[str, float]]  # by the ranks of a job: what one of them has


class Kind(NamedTuple):
    """A figure of a rank."""

    unit: str
    most_of_many: float | None = None  # that it may be in the job of MANY ranks
    is_logarithmic: bool = False  # whether it may grow as the logarithm of the ranks and no faster


REQUESTS, STEP_REQUESTS = "requests of the store, start", "requests of the store, a step"
MOST_REQUESTS = f"{REQUESTS}, of the rank that has the most"
REPEATED_LOOKS = "requests of the store, start, repeated looks"
WATCH_REQUESTS = "requests of the store, the watch, a second"
MEMORY, CPU = "memory", "CPU time, start"
KINDS = {
    REQUESTS: Kind("requests", is_logarithmic=True),
    MOST_REQUESTS: Kind("requests", is_logarithmic=True),
    STEP_REQUESTS: Kind("requests", is_logarithmic=True),
    REPEATED_LOOKS: Kind("requests"),
    WATCH_REQUESTS: Kind("requests"),
    "threads": Kind("threads"),
    "descriptors": Kind("descriptors", 200),
    MEMORY: Kind("MiB", 200),
    CPU: Kind("s"),
}


@dataclass(frozen=True)
class Law:
    constant: float
    slope: float  # for twice as many ranks

    @staticmethod
    def of(figures: Mapping[int, float]) -> Law:
        """Fits it to a figure of jobs by their ranks."""
        sizes = [math.log2(ranks) for ranks in figures]
        slope, constant = np.polyfit(sizes, list(figures.values()), 1)
        return Law(float(constant), float(slope))

    def at(self, ranks: int) -> float:
        return self.constant + self.slope * math.log2(ranks)


def growth_rows(
    job: str, series: Series, requests_per_s: float, kept_mib: float = 0.0
) -> list[Row]:
    """What a rank has in the largest job beside its law, and what it has in the job of MANY.

    requests_per_s: that a store serves. kept_mib: what a rank keeps for all of MANY others, which
    grows as their number and so is in no law.
    """
    rows, many = [], {}
    kinds = {what: kind for what, kind in KINDS.items() if what in series[max(series)]}
    for what, kind in kinds.items():
        figures = {ranks: found[what] for ranks, found in series.items()}
        largest = max(figures)
        expected = Law.of({n: figure for n, figure in figures.items() if n < largest}).at(largest)
        rows.append(
            row(
                f"{job}, {largest} ranks: {what}",
                kind.unit,
                figures[largest],
                peer=expected,
                peer_name=f"the law of {min(figures)} to {largest // 2} ranks",
                bar=MOST_OVER_LAW * expected if kind.is_logarithmic else None,
            )
        )
        many[what] = Law.of(figures).at(MANY) + (kept_mib if what == MEMORY else 0)
    job = f"{job}, extrapolated to {MANY:,} ranks"
    rows += [
        row(f"{job}: {what}", kind.unit, many[what], bar=kind.most_of_many)
        for what, kind in kinds.items()
    ]
    start_s = MANY * many[REQUESTS] / requests_per_s + many.get(CPU, 0)
    rows.append(row(f"{job}: communication of the start", "s", start_s, bar=MOST_START_S))
    return rows
