"""tools/ablation: what it makes of made-up steps, and a real round."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ablation import PUBLISHED, parts_rows, speedup_rows, table_9_rows

TOOL = Path(__file__).parent.parent.parent / "tools" / "ablation"
ORDER = "Table 9, neighbours in the paper's order"
STEP_S = {name: 2 * percent / 100 for name, percent in PUBLISHED.items()}
JITTER = [0.001, -0.002, 0.0, 0.003, -0.001, 0.002, -0.003, 0.001, 0.0]


def steps(**disturbed: Sequence[float | None]) -> dict[str, list[float | None]]:
    """Nine rounds as published; `disturbed`: what a configuration's steps come to instead."""
    rounds: dict[str, list[float | None]] = {
        name: [step_s * (1 + jitter) for jitter in JITTER] for name, step_s in STEP_S.items()
    }
    return rounds | {name.replace("_", " "): list(other) for name, other in disturbed.items()}


def table_9(**disturbed: Sequence[float | None]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in table_9_rows(steps(**disturbed))}


def test_quiet_steps_are_judged() -> None:
    rows = table_9()
    assert not [name for name, row in rows.items() if row.get("not_judged")]
    assert rows[ORDER]["ours"] == rows[ORDER]["bar"] == 4
    for name, percent in PUBLISHED.items():
        assert rows[f"Table 9, {name}"]["ours"] == pytest.approx(percent)


def test_a_minute_that_disturbs_one_configuration_turns_nothing() -> None:
    usual = steps()["without overlap"]
    rows = table_9(without_overlap=[*usual[:8], 9.0])
    assert rows[ORDER]["ours"] == 4 and not rows[ORDER].get("not_judged")
    assert rows["Table 9, without overlap"]["ours"] == pytest.approx(101.8, abs=0.1)


def test_a_configuration_that_is_disturbed_in_many_rounds_is_not_judged() -> None:
    usual = steps()["without overlap"]
    rows = table_9(without_overlap=[*usual[:5], 2.2, 2.3, 2.4, 2.5])
    assert rows["Table 9, without SR&AG against without overlap"]["not_judged"]
    assert not rows["Table 9, uniform 1F1B against CPU-mediated TCP"]["not_judged"]
    assert rows[ORDER]["ours"] == 3 and rows[ORDER]["not_judged"]


def test_steps_that_the_host_did_not_keep_up_with_are_not_used() -> None:
    usual = steps()["uniform 1F1B"]
    rows = table_9(uniform_1F1B=[*usual[:5], None, None, None, None])
    assert rows["Table 9, uniform 1F1B"]["not_judged"].startswith("rounds that can be used: 5,")
    assert rows[ORDER]["not_judged"]
    rows = table_9(uniform_1F1B=[*usual[:6], None, None, None])
    assert rows["Table 9, uniform 1F1B"]["ours"] == pytest.approx(126.4, abs=0.3)
    assert rows[ORDER]["ours"] == 4 and not rows[ORDER].get("not_judged")


def test_another_order_than_the_papers_is_judged_too() -> None:
    rows = table_9(without_overlap=[2.5] * 9)
    assert rows[ORDER]["ours"] == 3 and not rows[ORDER].get("not_judged")


def test_speedup_ratios_are_of_one_round() -> None:
    alone: dict[str, list[float | None]] = {v: [4.0, 8.0] * 5 for v in "abcd"}
    together = {f"Exp-{name}": [2.0, 4.0] * 5 for name in ("A-1", "A-2", "B-1", "B-2")}
    found = {row["name"]: row for row in speedup_rows(alone | together)}
    assert found["HeteroSpeedupRatio, twin of Exp-A-1"]["ours"] == pytest.approx(200 / 3, rel=1e-4)
    assert found["HeteroSpeedupRatio, twin of Exp-A-2"]["ours"] == pytest.approx(200, rel=1e-4)
    alone["d"] = [None] * 10
    found = {row["name"]: row for row in speedup_rows(alone | together)}
    assert found["HeteroSpeedupRatio, twin of Exp-B-2"]["not_judged"].startswith(
        "rounds that can be used: 0,"
    )
    assert not found["HeteroSpeedupRatio, twin of Exp-A-2"]["not_judged"]


def test_parts_of_sequences_are_held_against_equal_ones_and_the_simulator() -> None:
    equal: list[float | None] = [5.2, 5.0, 5.1, None, 5.2, 5.0, 5.1, 5.3]
    by_speed: list[float | None] = [4.0, 4.0, 4.08, 4.0, 4.0, 4.0, 4.0, None]
    steps = {"equal parts": equal, "parts by speed": by_speed}
    gain, off, also_off = parts_rows(steps, {"equal parts": 5.0, "parts by speed": 4.04})
    assert gain["ours"] == pytest.approx(5.1 / 4.04, rel=0.02) and gain["bar"] == 1.25
    assert gain["better"] == "higher" and gain["unit"] == "x"
    assert off["ours"] == pytest.approx(100 * (1 - 5.0 / 5.1), rel=1e-3)
    assert also_off["ours"] == pytest.approx(1.0) and also_off["bar"] == 2


@pytest.mark.exhaustive
def test_a_round_of_parts_of_sequences() -> None:
    done = subprocess.run(
        [TOOL, "--no-table-9", "--no-ratios", "--no-experts", "--no-slices", "--rounds", "1",
         "--json"],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names = [row["name"] for row in json.loads(done.stdout)["rows"]]
    assert names[0] == "parts by speed, tokens/s to those of equal parts" and len(names) == 5


@pytest.mark.exhaustive
def test_a_round_of_sequences_in_slices() -> None:
    done = subprocess.run(
        [TOOL, "--no-table-9", "--no-ratios", "--no-parts", "--no-experts", "--rounds", "1",
         "--json"],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
    assert "slices, tokens/s to those of the best plan without" in rows and len(rows) == 5


@pytest.mark.exhaustive
def test_a_round_of_table_9() -> None:
    """It says what it could use, however busy the machine is."""
    done = subprocess.run(
        [TOOL, "--no-ratios", "--no-parts", "--no-experts", "--no-slices", "--rounds", "1",
         "--json"],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
    for name, published in PUBLISHED.items():
        row = rows[f"Table 9, {name}"]
        assert row["peer"] == published and "rounds that can be used" in row["not_judged"]
    assert 0 <= rows["steps that are used"]["ours"] <= 100
