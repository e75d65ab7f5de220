"""tools/dispatch-bench: the evidence it prints."""

from __future__ import annotations

import json

import pytest
from on_chip import run_tool


@pytest.mark.long
def test_evidence() -> None:
    done = run_tool("dispatch-bench", "--json", "--rounds", "4", "--chip", "a-mini")
    assert done.returncode == 0, done.stderr
    evidence = json.loads(done.stdout)
    assert evidence["tool"] == "dispatch-bench"
    for name in ("add", "sum().item()", "training step"):
        timeless, paced = (row for row in evidence["rows"] if row["name"].startswith(f"{name} on "))
        assert timeless["bar"] == pytest.approx(1.5 * timeless["peer"], rel=1e-3)
        assert paced["bar"] is None
        assert timeless["ours"] > 0 and timeless["unit"] == paced["unit"] == "us"
    reading = next(
        row for row in evidence["rows"] if row["name"].startswith("sum().item() on chip")
    )
    assert reading["ours"] > 40  # two launches of chip a-mini, which it waits for


@pytest.mark.exhaustive
def test_a_chip_that_is_not_there() -> None:
    done = run_tool("dispatch-bench", "--chip", "nope", "--rounds", "4")
    assert done.returncode == 2
    assert "chip 'nope': expected one of a, " in done.stderr
    assert "Traceback" not in done.stderr
