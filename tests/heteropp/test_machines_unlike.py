"""What is unlike on one of a job's machines is told with both values before the first step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lab_job import MACHINES, lab_job
from sampled import sampled
from training_run import make_plan, tiny_model

from heteropp.description.hyperparameters import Hyperparameters
from heteropp.runtime.ranks.agreement import own_terms, unlike_clocks, unlike_terms
from heteropp.runtime.training_run import TrainingRun

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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"weights": None}, "two has --from none, and one with hash "),
        ({"attention_within": "document"}, 'two has --attention-within "document", and one '),
        ({"documents": 8}, "two has --documents 8, and one 0"),
        ({"validation": {}}, 'two has --validation [], and one ["books", "code"]'),
    ],
)
def test_what_the_nodes_train_on_must_be_alike(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    first = run_from(tmp_path)
    found = unlike_terms(["one", "two"], [own_terms(first), own_terms(replace(first, **changes))])
    assert found is not None and found.startswith(said)
    other_order = replace(first, validation=dict(reversed(first.validation.items())))
    assert own_terms(other_order) == own_terms(first)


def test_a_resumed_run_reads_no_weights_and_compares_none() -> None:
    assert own_terms(replace(run_from(Path("gone")), resume=True))["--from"] == "none"


def run_from(weights: Path) -> TrainingRun:
    return TrainingRun(
        plan=make_plan(tiny_model(), (2, 2), (1, 1), (1, 1), (False, False)),
        cluster=None,
        chips=(),
        steps=1,
        output=Path("run"),
        data=None,
        validation={"books": Path("books"), "code": Path("code")},
        weights=weights,
        resume=False,
        resume_from=None,
        checkpoint_every=0,
        keep=1,
        deadline_s=60,
        seed=0,
        hyperparameters=Hyperparameters(decay_steps=1),
        device="cpu",
    )


def test_clocks_may_differ_by_a_little() -> None:
    assert unlike_clocks(["one", "two", "three"], [0.0, 59.0, -59.0]) is None
    told = unlike_clocks(["one", "two", "three"], [0.0, 59.0, 3600.0])
    assert told == (
        "the clock of three says 1970-01-01 01:00:00 UTC, and that of one 1970-01-01 00:00:00 UTC; "
        "expected less than 60 s between any two"
    )
