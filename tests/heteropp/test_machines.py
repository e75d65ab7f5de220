"""A job over three machines, each a set of namespaces: it trains as on one, and ends in time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab_job import DEADLINE_S, FOREVER, MACHINES, NODE, SETTINGS, STEPS, Job, lab_job, losses_of
from machines import Machine
from sampled import sampled
from training_run import start, wait

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "machines.md"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with lab_job(tmp_path) as started:
        yield started


@pytest.mark.exhaustive
@pytest.mark.parametrize("elastic", [True, False], ids=["elastic", "plain"])
def test_a_job_over_machines_computes_what_it_does_on_one(job: Job, elastic: bool) -> None:
    steps = ("--steps", "8")
    job.start(*steps, elastic=elastic)
    for number in range(MACHINES):
        job.wait_for(lambda number=number: job.ended(number), 200)
        assert job.processes[number].returncode == 0, job.said()
    alone = start(job.folder, "--output", str(job.folder / "alone"), *SETTINGS, *steps)
    code, stdout, stderr = wait(alone, 100)
    assert code == 0, stdout + stderr
    assert job.losses == losses_of(job.folder / "alone")
    assert len(job.losses) == 8


@pytest.mark.exhaustive
def test_the_guide_s_torchrun_trains_as_one_machine_does(job: Job) -> None:
    blocks = re.findall(r"```shell\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (line,) = (block.strip() for block in blocks if block.startswith("torchrun"))
    nodes = "--nnodes 2 --nproc-per-node 8"
    assert nodes in line
    line = line.replace(nodes, f"--nnodes {MACHINES} --nproc-per-node 1") + " --steps 5"
    for machine in job.machines:
        machine.do(f"echo {job.machines[0].address} host >> /etc/hosts")
    job.start_by([line] * MACHINES)
    for number in range(MACHINES):
        job.wait_for(lambda number=number: job.ended(number), 200)
        assert job.processes[number].returncode == 0, job.said()
    words = "--plan plan.json --cluster cluster.toml --output alone --steps 5"
    command = [sys.executable, "-m", "heteropp.cli.train", *words.split()]
    environment = {**os.environ, "XDG_CACHE_HOME": str(job.folder / "cache")}
    subprocess.run(command, cwd=job.folder, env=environment, check=True, timeout=100)
    losses = losses_of(job.folder / "runs" / "train")
    assert losses == losses_of(job.folder / "alone")
    assert len(losses) == 5


def on(number: int) -> str:
    return f"rank {number} (chip NEUTRAL) on machine-{number}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("lost", [0, 2], ids=["with-the-store", "another"])
def test_ranks_end_when_a_machine_vanishes(job: Job, lost: int) -> None:
    """Each names what it does not hear: the store's machine, or the rank that is gone."""
    job.start("--steps", FOREVER)
    job.until_step(3)
    job.machines[lost].cut_off()
    store = "machine-0, the machine of rank 0 (chip NEUTRAL) and of the job's store,"
    name = store if lost == 0 else on(lost)
    for number in {0, 1, 2} - {lost}:
        job.wait_for(lambda number=number: "stopped" in job.said_by(number), 2 * DEADLINE_S)
        (line,) = (line for line in job.said_by(number).splitlines() if " stopped " in line)
        assert line.endswith(f": {name} has not answered for {DEADLINE_S} s"), job.said()
    job.wait_for(lambda: "stopped" in job.said_by(lost), 2 * DEADLINE_S)  # the lost one knows, too
    for number in range(MACHINES):  # and so do their torchruns
        job.wait_for(lambda number=number: job.ended(number), 60)


@pytest.mark.exhaustive
@pytest.mark.parametrize("elastic", [True, False])
@pytest.mark.parametrize("when", ["when-they-have-met", "before-they-call-it"])
def test_processes_end_when_the_machine_of_the_store_vanishes_while_they_start(
    job: Job, when: str, elastic: bool
) -> None:
    job.start("--steps", FOREVER, elastic=elastic)
    if when == "before-they-call-it":
        ranks = {"0", "1", "2"}
        job.wait_for(lambda: {one["RANK"] for one in job.started()} >= ranks, 200)
    else:
        job.wait_for((job.output / ".secret").exists, 200)
    job.machines[0].cut_off()
    for number in (1, 2):
        job.wait_for(lambda number=number: job.ended(number), 200)
        said = job.said_by(number)
        who = f"node {NODE}-{number}" if elastic else f"rank {number}"
        (line,) = {line for line in said.splitlines() if line.startswith(who)}
        assert "machine-0, the machine of" in line and "the job's store, has not answered" in line
    assert not job.metrics


@pytest.mark.parametrize("lost", sampled([0, 1, 2], 3))
def test_a_killed_machine_is_named_and_not_who_noticed(job: Job, lost: int) -> None:
    job.start("--steps", FOREVER)
    job.until_step(3)
    job.machines[lost].kill()
    store = "machine-0, the machine of rank 0 (chip NEUTRAL) and of the job's store, died"
    cause = store if lost == 0 else f"{on(lost)} died or is cut off"
    for number in {0, 1, 2} - {lost}:
        job.wait_for(lambda number=number: job.ended(number), 120)
        (line,) = (line for line in job.said_by(number).splitlines() if " stopped " in line)
        assert line.endswith(f": {cause}"), job.said()


@pytest.mark.long
def test_a_machine_whose_disk_is_full_is_the_cause_that_all_name(job: Job) -> None:
    folder = job.output / "checkpoints"
    folder.mkdir(parents=True)
    job.machines[1].do(f"mount -t tmpfs -o size=16k disk '{folder}'")
    job.start("--steps", FOREVER, "--checkpoint-every", "3")
    for number in range(MACHINES):
        job.wait_for(lambda number=number: job.ended(number), 250)
        (line,) = (line for line in job.said_by(number).splitlines() if " stopped" in line)
        assert f"{on(1)} stopped: {folder}/" in line or line.startswith("rank 1 "), job.said()
        assert "cannot be written: No space left on device" in line, job.said()


@pytest.mark.parametrize(
    ("lost", "how"),
    [
        pytest.param(1, Machine.cut_off, marks=pytest.mark.exhaustive),
        pytest.param(2, Machine.kill, marks=pytest.mark.exhaustive),
    ],
)
def test_an_elastic_job_outlives_a_machine_that_vanishes(
    job: Job, lost: int, how: Callable[[Machine], None]
) -> None:
    job.start(*STEPS, *job.remote, elastic=True)
    job.until_step(10)
    how(job.machines[lost])
    job.wait_for(lambda: "written to" in job.said_by(0), 120)
    silent = [line for line in job.said_by(0).splitlines() if "has not answered" in line]
    assert silent[0] == f"node {NODE}-{lost} has not answered for 10 s"
    assert silent[1].startswith(f"{NODE}-{lost}/0 is lost: its node has not answered for ")
    job.assert_as_alone()


@pytest.mark.exhaustive
def test_an_elastic_job_outlives_the_machine_of_its_leader(job: Job) -> None:
    """Torchrun, whose own store is on another one, starts the agents again."""
    job.start(*STEPS, *job.remote, elastic=True, endpoint=1)
    job.until_step(10)
    job.machines[0].cut_off()
    job.machines[0].kill()  # unheard
    job.wait_for(lambda: "written to" in job.said_by(1), 300)
    for number in (1, 2):
        assert agent_stopped(number) in job.said_by(number)
    job.assert_as_alone()


@pytest.mark.long
def test_an_elastic_job_ends_when_the_machine_of_its_store_vanishes(job: Job) -> None:
    job.start("--steps", FOREVER, elastic=True)
    job.until_step(3)
    job.machines[0].cut_off()
    for number in (1, 2):
        job.wait_for(lambda number=number: agent_stopped(number) in job.said_by(number), 60)
    for number in (1, 2):
        job.wait_for(lambda number=number: job.ended(number), 60)
        assert "terminate called" not in job.said_by(number)


def agent_stopped(number: int) -> str:
    store = "machine-0, the machine of the job's store,"
    return f"node {NODE}-{number} stopped: {store} has not answered for {DEADLINE_S} s\n"
