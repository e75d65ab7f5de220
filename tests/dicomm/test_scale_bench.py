"""tools/scale-bench: a small job's figures, and how they grow."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
from evidence import is_met
from scale.growth import MOST_OVER_LAW, REQUESTS, growth_rows
from scale.sizes import MANY

LIMIT_S = 840  # of which dozens of ranks take minutes where other tests run beside them
TOOL = Path(__file__).parents[2] / "tools" / "scale-bench"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([TOOL, *arguments], capture_output=True, text=True, timeout=LIMIT_S)


def rows_of(*arguments: str) -> dict[str, Any]:
    done = run("--json", *arguments)
    assert done.returncode == 0, done.stderr
    evidence: dict[str, Any] = json.loads(done.stdout)
    assert evidence["tool"] == "scale-bench"
    return {row["name"]: row for row in evidence["rows"]}


def test_groups_cost_a_rank_nothing_but_their_requests() -> None:
    rows = rows_of("--ranks", "4", "--groups", "3", "--largest", "0", "--no-protection")
    for transport in ("shm", "tcp"):
        for what, bar in (("threads", 0), ("descriptors", 60)):
            row = rows[f"4 ranks, {transport}: {what} that 3 groups add"]
            assert (row["ours"], row["bar"]) == (0, bar)
        assert rows[f"4 ranks, {transport}: requests of the store, a group"]["ours"] == 1
        # a plan's groups are of all four and of one alone; steps ask for nothing
        assert rows[f"4 ranks, {transport}: requests of the store, a plan's groups"]["ours"] >= 1
        assert rows[f"4 ranks, {transport}: requests of the store, a step"]["ours"] == 0
        # the main thread and the one that moves bytes; a connection with each of the other ranks
        assert rows[f"4 ranks, {transport}, all connected: threads"]["ours"] == 2
        assert rows[f"4 ranks, {transport}, all connected: descriptors"]["ours"] >= 3 + 3
        assert rows[f"4 ranks, {transport}: barrier after all are connected"]["ours"] > 0


def test_a_job_of_one_rank_is_refused_in_one_sentence() -> None:
    done = run("--ranks", "1")
    assert done.returncode == 2 and "Traceback" not in done.stderr


@pytest.mark.parametrize("option", ["--largest", "--training-ranks"])
def test_a_series_of_too_few_jobs_is_refused_in_one_sentence(option: str) -> None:
    for largest in ("8", "96"):
        done = run(option, largest)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert f"{option} is {largest}; expected 0 or a power of 2 from" in done.stderr


def test_what_grows_as_the_logarithm_is_extrapolated_and_what_grows_faster_is_told() -> None:
    sizes = (16, 32, 64, 128)
    logarithmic = {ranks: {REQUESTS: 3 + 2 * math.log2(ranks)} for ranks in sizes}
    linear = {ranks: {REQUESTS: 3.0 + ranks} for ranks in sizes}
    (held, many), (missed, _) = (
        [row for row in growth_rows("job", series, 1e5) if REQUESTS in row["name"]]
        for series in (logarithmic, linear)
    )
    assert is_met(held) and held["ratio"] == pytest.approx(1)
    assert many["ours"] == pytest.approx(3 + 2 * math.log2(MANY))
    assert not is_met(missed) and missed["ours"] > MOST_OVER_LAW * missed["peer"]


def grows_as_the_logarithm(rows: dict[str, Any], job: str, largest: int) -> None:
    """A request of each rank for each other would add 12 and more for twice as many ranks."""
    now = rows[f"{job}, {largest} ranks: {REQUESTS}"]["ours"]
    many = rows[f"{job}, extrapolated to {MANY:,} ranks: {REQUESTS}"]["ours"]
    assert many - now < 8 * math.log2(MANY / largest)


@pytest.mark.exhaustive
@pytest.mark.timeout(LIMIT_S + 60)
def test_the_ranks_of_a_plan_cost_no_more_than_is_asked_of_thousands() -> None:
    rows = rows_of("--ranks", "2", "--groups", "1", "--largest", "128")
    for setting, bar in (("integrity", 1.25), ("encryption", 1.6)):
        price = rows[f"tcp C++ 1 MiB, {setting} / unprotected"]
        assert price["bar"] == bar and price["ours"] > 0
    for transport in ("shm", "tcp"):
        many = f"C++, {transport}, extrapolated to 8,192 ranks"
        grows_as_the_logarithm(rows, f"C++, {transport}", 128)
        assert is_met(rows[f"{many}: descriptors"]) and is_met(rows[f"{many}: memory"])


@pytest.mark.exhaustive
@pytest.mark.timeout(LIMIT_S + 60)
def test_ranks_that_train_ask_the_store_for_as_much_in_larger_jobs() -> None:
    words = ("--ranks", "2", "--groups", "1", "--largest", "0", "--training-ranks", "32")
    rows = rows_of(*words, "--no-protection")
    grows_as_the_logarithm(rows, "training", 32)
    # a step's metrics are written and taken away; one of the first says when the run ends
    assert 2 <= rows["training, 32 ranks: requests of the store, a step"]["ours"] <= 4
    assert is_met(rows["training, extrapolated to 8,192 ranks: descriptors"])
    assert is_met(rows["training, extrapolated to 8,192 ranks: memory"])
