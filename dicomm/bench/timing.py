"""Orders that every contestant understands, and the summary of the times that it answers with."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

DEADLINE_S = 60.0  # of one wait inside a contestant
WINDOW = 64  # messages in flight, fewer of long ones
WINDOW_BYTES = 64 << 20


@dataclass(frozen=True)
class Order:
    """What all ranks of a contestant do next.

    kind: "latency" (send and receive back: half a round trip is timed), "uni" (a window of
    messages to rank 1, answered by one byte), "bi" (a window each way at once), or the name of a
    collective. bytes: of one message, or of the vector that a collective's whole group works on.
    """

    kind: str
    bytes: int
    window: int  # messages in flight; 1 where there is no window
    count: int  # how many are timed

    @property
    def untimed(self) -> int:
        """How many are done first without timing them, so that caches and connections are warm."""
        return self.count // 10 + 1


@dataclass(frozen=True)
class Timing:
    """Median and 99th percentile of one order's times, in microseconds.

    p99_us is None where a contestant's program does not report it.
    """

    p50_us: float
    p99_us: float | None


class Failed(Exception):
    """A contestant did not do what it was ordered to do; the message is one sentence."""


def window_of(size_bytes: int) -> int:
    return max(2, min(WINDOW, WINDOW_BYTES // size_bytes))


def timing_of(samples_us: Sequence[float]) -> Timing:
    ordered = sorted(samples_us)
    return Timing(statistics.median(ordered), ordered[math.ceil(0.99 * len(ordered)) - 1])


def over_rounds(rounds: Sequence[Timing]) -> Timing:
    """Medians over rounds, so that a round that something disturbed does not count."""
    tails = [timing.p99_us for timing in rounds if timing.p99_us is not None]
    return Timing(
        statistics.median(timing.p50_us for timing in rounds),
        statistics.median(tails) if tails else None,
    )


def geometric_mean(values: Iterable[float]) -> float:
    return statistics.geometric_mean(values)
