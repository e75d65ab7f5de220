"""Which rows of a benchmark count: made-up rounds of quiet, disturbed and loud machines."""

from __future__ import annotations

import random

import pytest

from dicomm.bench.judging import is_judged, median_interval, row_over_rounds

QUIET = [104.7, 104.9, 104.8, 104.8, 104.6, 104.9, 105.0, 104.8, 104.7]


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    generator = random.Random(0)
    for count in (6, 9, 12, 25):
        held = 0
        for _ in range(2000):
            interval = median_interval([generator.gauss(0, 1) for _ in range(count)])
            assert interval
            held += interval[0] <= 0 <= interval[1]
        assert held >= 0.94 * 2000


def test_a_disturbed_round_of_nine_moves_no_end_of_the_spread_far() -> None:
    assert median_interval([*QUIET[:-1], 160.0]) == (104.7, 105.0)
    assert median_interval(QUIET) == (104.7, 104.9)


@pytest.mark.parametrize(("bar", "better"), [(104.0, "higher"), (105.5, "lower")])
def test_quiet_rounds_are_judged(bar: float, better: str) -> None:
    row = row_over_rounds("slower by", "%", QUIET, peer=104.8, bar=bar, better=better)
    assert is_judged(row)
    assert row["ours"] == 104.8 and row["spread"] == [104.7, 104.9] and row["ratio"] == 1.0


def test_a_bar_within_the_spread_is_not_judged() -> None:
    loud = [97.0, 112.0, 104.8, 99.1, 109.4, 101.2, 95.9, 120.6, 104.1]
    row = row_over_rounds("slower by", "%", loud, bar=100.0, better="higher")
    assert not is_judged(row) and row["spread"] == [97.0, 112.0]
    assert row["not_judged"].startswith("the noise of this machine could turn it")


def test_a_spread_without_a_bar_is_only_told() -> None:
    assert is_judged(row_over_rounds("slower by", "%", [90.0, 100.0, 120.0] * 3))


@pytest.mark.parametrize("rounds", range(6))
def test_few_rounds_are_not_judged(rounds: int) -> None:
    row = row_over_rounds("slower by", "%", [110.0] * rounds, bar=100.0, better="higher")
    assert row["spread"] is None and row["not_judged"].startswith(
        f"rounds that can be used: {rounds},"
    )
    assert row["ours"] == (110.0 if rounds else None)
