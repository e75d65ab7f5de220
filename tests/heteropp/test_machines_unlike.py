"""What is unlike on one of a job's machines is told with both values before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab_job import MACHINES, lab_job
from sampled import sampled

from heteropp.runtime.ranks.agreement import unlike_clocks, unlike_terms

THIRD, FIRST = "rank 2 (chip NEUTRAL) on machine-2", "rank 0 (chip NEUTRAL) on machine-0"
OTHER_VERSION = """
import importlib.metadata
own = importlib.metadata.version
importlib.metadata.version = lambda name: "0.0.7" if name == {package!r} else own(name)
"""
OTHER_CLOCK = """
import time
own = time.time
time.time = lambda: own() + 3600
"""


@pytest.mark.parametrize(
    ("site", "file", "said"),
    sampled(
        [
            ("", "plan.json", f"{THIRD} has plan with hash "),
            (OTHER_CLOCK, None, f"the clock of {THIRD} says "),
            (
                OTHER_VERSION.format(package="hyperhetero"),
                None,
                f"{THIRD} has hyperhetero 0.0.7, and ",
            ),
            ("", "cluster.toml", f"{THIRD} has cluster with hash "),
        ],
        every=4,
    ),
    ids=["plan", "clock", "version", "cluster"],
)
def test_it_ends_the_job_by_one_sentence(
    tmp_path: Path, site: str, file: str | None, said: str
) -> None:
    """site: what every Python of the third machine runs first. file: is another one there."""
    with lab_job(tmp_path) as job:
        if file:
            given, other = tmp_path / file, tmp_path / "other"
            other.write_text(given.read_text().replace('"1f1b"', '"zb-h1"').replace("test", "own"))
            job.machines[2].do(f"mount --bind {other} {given}")
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "sitecustomize.py").write_text(site)
        job.environments[2] = {"PYTHONPATH": str(tmp_path / "site")}
        job.start("--steps", "3")
        for number in range(MACHINES):
            job.wait_for(lambda number=number: said in job.said_by(number), 200)
        assert FIRST in job.said()
        assert not job.metrics


@pytest.mark.long
def test_another_torch_is_told_and_trains(tmp_path: Path) -> None:
    with lab_job(tmp_path) as job:
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "sitecustomize.py").write_text(OTHER_VERSION.format(package="torch"))
        job.environments[2] = {"PYTHONPATH": str(tmp_path / "site")}
        job.start("--steps", "3")
        job.until_step(3)
        assert f"warning: {THIRD} has torch 0.0.7, and {FIRST} 2." in job.said_by(0)


def test_only_what_differs_is_told() -> None:
    terms = [{"plan": "p", "--steps": "3"}, {"plan": "p", "--steps": "3"}]
    assert unlike_terms(["one", "two"], terms) is None
    terms[1]["--steps"] = "4"
    told = "two has --steps 4, and one 3; expected the same on all nodes"
    assert unlike_terms(["one", "two"], terms) == told


def test_clocks_may_differ_by_a_little() -> None:
    assert unlike_clocks(["one", "two", "three"], [0.0, 59.0, -59.0]) is None
    told = unlike_clocks(["one", "two", "three"], [0.0, 59.0, 3600.0])
    assert told == (
        "the clock of three says 1970-01-01 01:00:00 UTC, and that of one 1970-01-01 00:00:00 UTC; "
        "expected less than 60 s between any two"
    )
