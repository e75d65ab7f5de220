"""What integrity and encryption of messages over TCP cost, beside none."""

from __future__ import annotations

import tempfile

from evidence import Row

from dicomm.bench import security
from dicomm.bench.rounds import compete
from scale import Failed

SIZES = (64 << 10, 1 << 20, 16 << 20, 64 << 20)
REPEATS, ROUND_S = 5, 0.06


def protection_rows() -> list[Row]:
    """The rows of `dicomm-bench security`. Raises Failed."""
    with tempfile.TemporaryDirectory(prefix="scale-bench-") as folder:
        cases = [("latency", size) for size in SIZES]
        found = compete(security.entries(folder), cases, REPEATS, ROUND_S)
    for name, why in found.missing.items():
        raise Failed(f"{name}: {why}")
    return security.rows(found, SIZES)
