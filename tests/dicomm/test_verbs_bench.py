"""tools/verbs-bench: which of its rows count, of made-up rounds."""

from __future__ import annotations

from typing import Any

import pytest
from verbs_bench import BANDWIDTH_TOOLS, LATENCY_TOOLS, make_rows

ASKED = "latency, 8 B: dicomm / ib_write_lat"
JITTER = [1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 0.99, 1.0]


def rows_of(**other: list[float]) -> dict[str, dict[str, Any]]:
    """Nine quiet rounds, but for what is given: a tool's latencies in us at 8 B."""
    samples = {f"{tool} {size}": list(JITTER) for tool in LATENCY_TOOLS for size in (8, 4096)}
    samples |= {f"{tool} {1 << 20}": [100.0] * 9 for tool in BANDWIDTH_TOOLS}
    samples |= {f"dicomm latency {size}": [1.1 * each for each in JITTER] for size in (8, 4096)}
    samples[f"dicomm bandwidth {1 << 20}"] = [90.0] * 9
    samples |= {f"{tool} 8": found for tool, found in other.items()}
    return {row["name"]: row for row in make_rows(samples)}


def test_quiet_rounds_are_judged() -> None:
    rows = rows_of()
    assert not [name for name, row in rows.items() if row.get("not_judged")]
    assert rows[ASKED]["ours"] == pytest.approx(1.1, rel=1e-3) and rows[ASKED]["bar"] == 1.25
    bandwidth = rows["bandwidth, 1048576 B: ib_write_bw / dicomm"]
    assert bandwidth["ours"] == pytest.approx(10 / 9, rel=1e-3)


def test_one_round_without_a_processor_turns_nothing() -> None:
    row = rows_of(ib_write_lat=[*JITTER[:8], 1000.0])[ASKED]
    assert row["ours"] == pytest.approx(1.1, rel=1e-3) and not row["not_judged"]


@pytest.mark.parametrize("quick", [0, 4])
def test_a_peer_that_only_lacked_a_processor_is_not_judged(quick: int) -> None:
    row = rows_of(ib_write_lat=[1.0] * quick + [1000.0] * (9 - quick))[ASKED]
    assert row["not_judged"].startswith("ib_write_lat only lacked a processor: it took 1000 us")


def test_rounds_that_disagree_are_not_judged() -> None:
    row = rows_of(ib_write_lat=[0.8, 1.0] * 4 + [0.9])[ASKED]
    assert row["spread"][0] < 1.25 < row["spread"][1] and row["not_judged"]
