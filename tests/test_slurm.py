"""examples/slurm.sbatch under a real Slurm, over three machines with chips of three types."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_job import losses_of, metrics_of
from slurm_lab import QUICKSTART_CHIPS, Slurm, slurm_lab

from heteropp.description.cluster import read_cluster

EXAMPLE = str(Path(__file__).parents[1] / "examples" / "slurm.sbatch")
LONG_S = 300  # for a planner and a few steps of the quickstart's model
MODEL = """\
name = "tiny"
layers = 6
hidden = 64
heads = 4
kv_heads = 2
intermediate = 128
vocab = 256
sequence_length = 32
dtype = "float32"
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    (tmp_path / "model.toml").write_text(MODEL)
    with slurm_lab(tmp_path) as started:
        yield started


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_a_job_over_unlike_partitions_is_requeued_without_a_drained_node(
    slurm: Slurm, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    nvidia = ("--partition=nvidia", "--nodes=1-2")
    ascend = ("--partition=ascend", "--nodes=1")
    asked = {"MODEL": "model.toml", "RUN": "run", "BUDGET": "2s", "STEPS": "100000"}
    job = slurm.submit(*nvidia, ":", *ascend, EXAMPLE, **asked)
    slurm.wait_for(lambda: len(metrics_of(run)) >= 3)
    assert nodes_of(run) == {"machine-0": "h20", "machine-1": "a100", "machine-2": "ascend-910b"}
    slurm.say("scontrol", "update", "nodename=machine-1", "state=drain", "reason=test")
    slurm.requeue(job)
    (saved,) = saved_by(slurm, job)
    slurm.wait_for(lambda: len(metrics_of(run)) >= saved + 3)
    assert nodes_of(run) == {"machine-0": "h20", "machine-2": "ascend-910b"}
    assert [m["step"] for m in metrics_of(run)][: saved + 3] == [*range(1, saved + 4)]
    slurm.say("scancel", job)
    slurm.wait_for(lambda: "JobState=CANCELLED" in slurm.state(job))


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_the_quickstart_s_plan_outlives_a_requeue_and_a_drained_node(tmp_path: Path) -> None:
    """Its model and batch are the example's own; all its losses are those of one machine."""
    with slurm_lab(tmp_path, QUICKSTART_CHIPS) as slurm:
        run = tmp_path / "run"
        gpus = ("--partition=nvidia", "--nodes=1-2")
        npus = ("--partition=ascend", "--nodes=1")
        job = slurm.submit(*gpus, ":", *npus, EXAMPLE, RUN="run", BUDGET="10s")
        slurm.wait_for(lambda: len(metrics_of(run)) >= 3, LONG_S)
        assert nodes_of(run) == {
            "machine-0": "a-mini",
            "machine-1": "c-mini",
            "machine-2": "b-mini",
        }
        slurm.requeue(job)
        saved = saved_by(slurm, job)[-1]
        slurm.wait_for(lambda: len(metrics_of(run)) >= saved + 3, LONG_S)
        slurm.say("scontrol", "update", "nodename=machine-1", "state=drain", "reason=test")
        slurm.requeue(job, times=2)
        saved = saved_by(slurm, job)[-1]
        slurm.wait_for(lambda: len(metrics_of(run)) >= saved + 3, LONG_S)
        assert nodes_of(run) == {"machine-0": "a-mini", "machine-2": "b-mini"}
        slurm.say("scancel", job)
        slurm.wait_for(lambda: "JobState=CANCELLED" in slurm.state(job))
        there = metrics_of(run)
    assert [m["step"] for m in there] == [*range(1, len(there) + 1)]
    alone = subprocess.run(
        "heteropp-train --plan run/plan.json --device cpu --output alone --decay-steps 1000"
        f" --steps {len(there)}",
        shell=True, cwd=tmp_path, env=slurm.environment, capture_output=True, text=True,
    )  # fmt: skip
    assert alone.returncode == 0, alone.stderr
    assert [m["loss"] for m in there] == pytest.approx(losses_of(tmp_path / "alone"), rel=2e-6)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_job_is_saved_before_its_time_is_over_and_goes_on_when_it_is_submitted_again(
    slurm: Slurm, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    nodes = "--nodes=1-2"
    asked = {"MODEL": "model.toml", "RUN": "run", "BUDGET": "2s"}
    job = slurm.submit(nodes, EXAMPLE, STEPS="100000", **asked)
    slurm.wait_for(lambda: len(metrics_of(run)) >= 3)
    slurm.say("scontrol", "update", f"jobid={job}", "timelimit=6")  # minutes
    slurm.wait_for(lambda: "JobState=COMPLETED" in slurm.state(job))
    (saved,) = map(int, re.findall(r"told to stop: step (\d+) is saved", slurm.output(job)))
    again = slurm.submit(nodes, EXAMPLE, STEPS=str(saved + 4), **asked)
    slurm.wait_for(lambda: "JobState=COMPLETED" in slurm.state(again))
    assert [m["step"] for m in metrics_of(run)] == [*range(1, saved + 5)]
    assert losses_of(run)[-1] < losses_of(run)[0]


def saved_by(slurm: Slurm, job: str) -> list[int]:
    """The steps that the job's starts saved when they were told to stop."""
    return [int(step) for step in re.findall(r"step (\d+) is saved", slurm.output(job))]


def nodes_of(run: Path) -> dict[str, str]:
    return {node.name: node.chip_name for node in read_cluster(run / "cluster.toml").nodes}
