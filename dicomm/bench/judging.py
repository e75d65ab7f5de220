"""Rows of samples that were taken in turn, one a round, and whether they decide what is asked."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from dicomm.bench.evidence import Row, row

CONFIDENCE = 0.95  # that the interval of a median holds the true one
FEWEST = 6  # samples that have such an interval


def median_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """Returns between which two samples the true median lies; None of too few samples.

    The interval is that of the sign test: it assumes nothing of how the samples are distributed.
    """
    ordered, count = sorted(samples), len(samples)
    if count < FEWEST:
        return None
    outside, tail = 0, 0.0  # samples left out at each end; how probable the median is beyond one
    while 2 * (tail + math.comb(count, outside) / 2**count) <= 1 - CONFIDENCE:
        tail += math.comb(count, outside) / 2**count
        outside += 1
    return ordered[outside - 1], ordered[count - outside]


def row_over_rounds(
    name: str,
    unit: str,
    samples: Sequence[float],
    *,
    peer: float | None = None,
    peer_name: str | None = None,
    bar: float | None = None,
    better: str = "lower",
) -> Row:
    """Returns the row of the samples' median, with its `spread` and why it is `not_judged`, if so.

    It is not judged where the bar is inside the spread, the interval of the median: another run
    might come to the other verdict.
    """
    ours = statistics.median(samples) if samples else None
    found = row(name, unit, ours, peer=peer, peer_name=peer_name, bar=bar, better=better)
    spread = median_interval(samples)
    found["spread"] = spread and [float(f"{end:.5g}") for end in spread]
    found["not_judged"] = None
    if spread is None:
        found["not_judged"] = f"rounds that can be used: {len(samples)}, needed: {FEWEST}"
    elif bar is not None and spread[0] <= bar <= spread[1]:
        found["not_judged"] = f"the noise of this machine could turn it: {bar:g} is in the spread"
    return found


def is_judged(each: Row) -> bool:
    """Whether the row's verdict counts; that of a figure without samples does."""
    return not each.get("not_judged")
