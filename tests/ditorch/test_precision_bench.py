"""tools/precision-bench: the evidence it prints."""

from __future__ import annotations

import json

import pytest
from on_chip import run_tool


@pytest.mark.exhaustive
def test_evidence() -> None:
    done = run_tool(
        "precision-bench", "--json", "--rounds", "1", "--operator-rounds", "0", "--chip", "b"
    )
    assert done.returncode == 0, done.stderr
    evidence = json.loads(done.stdout)
    assert evidence["tool"] == "precision-bench"
    rows = {row["name"]: row for row in evidence["rows"]}
    for tool in ("MeasureTime", "FindOverflow", "Cast of mm to float64", "Fallback of mm"):
        row = rows[f"step on b: {tool}"]
        assert row["ratio"] == pytest.approx(row["ours"] / row["peer"])
        assert row["ours"] > 0 and row["better"] == "lower" and row["unit"] == "ms"


def test_a_chip_that_is_not_there() -> None:
    done = run_tool("precision-bench", "--chip", "nope", "--operator-rounds", "0")
    assert done.returncode == 2
    assert "chip 'nope': expected one of a, " in done.stderr
    assert "Traceback" not in done.stderr
