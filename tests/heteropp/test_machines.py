"""A job over three machines, each a set of namespaces: it trains as on one, and ends in time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab import lab
from machines import Machine
from training_run import (
    CHIP,
    NEUTRAL_CHIP,
    command,
    make_plan,
    start,
    tiny_model,
    wait,
    write_text,
)

from heteropp.description.plan import write_plan

MODEL = tiny_model()
PLAN = make_plan(MODEL, (1, 2, 1), (1, 1, 1), (1, 1, 1), (False, False, False))
MACHINES = PLAN.world_size
NODE = CHIP.removesuffix(".toml")
SETTINGS = ("--warmup-steps", "2", "--decay-steps", "600")
STEPS = ("--steps", "200")  # more than a test needs to disturb them
FOREVER = "100000"  # steps
DEADLINE_S = 15


class Job:
    """torchrun on each of the machines, as the README starts it, with all output in files."""

    def __init__(self, folder: Path, there: list[Machine]) -> None:
        self.folder, self.output, self.machines = folder, folder / "run", there
        self.processes: list[subprocess.Popen[str]] = []
        chip = NEUTRAL_CHIP.format(chips_per_node=1, capacity_bytes=1 << 30)
        (folder / CHIP).write_text(chip)
        nodes = f'[[nodes]]\nchip = "{CHIP}"\nchips = 1\n' * MACHINES
        (folder / "cluster.toml").write_text('name = "test"\n' + nodes)
        write_plan(PLAN, folder / "plan.json")
        write_text(folder / "text")

    def start(self, *arguments: str, elastic: bool = False, endpoint: int = 0) -> None:
        for number, machine in enumerate(self.machines):
            extra = ["--elastic", "--node-name", f"{NODE}-{number}"] if elastic else []
            nodes = f"2:{MACHINES}" if elastic else str(MACHINES)
            restarts = ("--max-restarts", "9") if elastic else ()
            timing = "last_call_timeout=15,keep_alive_interval=1,keep_alive_max_attempt=5"
            with (self.folder / f"{machine.name}.txt").open("w") as file:
                torchrun = [
                    *(
                        sys.executable,
                        "-m",
                        "torch.distributed.run",
                        "--nnodes",
                        nodes,
                        "--nproc-per-node",
                        "1",
                    ),
                    *(
                        "--rdzv-backend",
                        "c10d",
                        "--rdzv-endpoint",
                        f"{self.machines[endpoint].name}:29400",
                    ),
                    *("--rdzv-id", "run", "--rdzv-conf", timing, *restarts),
                    *("-m", "heteropp.cli.train", *command(self.folder), *extra),
                    *("--deadline", str(DEADLINE_S), *SETTINGS, *arguments),
                ]
                environment = {
                    **os.environ,
                    "XDG_CACHE_HOME": str(self.folder / "cache"),
                    "OMP_NUM_THREADS": "1",
                }
                if elastic:
                    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
                self.processes.append(machine.start(torchrun, environment, file))

    @property
    def metrics(self) -> list[dict]:
        return metrics_of(self.output)

    @property
    def losses(self) -> list[float]:
        return losses_of(self.output)

    @property
    def remote(self) -> tuple[str, ...]:
        """Copies of the state, which no machine takes along."""
        return ("--remote", str(self.folder / "remote"), "--keep-remote-every", "2")

    def assert_as_alone(self) -> None:
        """Each step is there once, with the loss of a job on one machine that nothing disturbed."""
        alone = start(self.folder, "--output", str(self.folder / "alone"), *SETTINGS, *STEPS)
        code, stdout, stderr = wait(alone, 100)
        assert code == 0, stdout + stderr
        expected = metrics_of(self.folder / "alone")
        assert [m["step"] for m in self.metrics] == [m["step"] for m in expected]
        assert self.losses == pytest.approx([m["loss"] for m in expected], rel=2e-6)

    def until_step(self, step: int, within_s: float = 150) -> None:
        self.wait_for(lambda: len(self.metrics) >= step, within_s)

    def wait_for(self, comes: Callable[[], bool], within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while not comes():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def ended(self, number: int) -> bool:
        return self.processes[number].poll() is not None

    def said(self) -> str:
        """Returns what all machines' processes said, for the message of a failed test."""
        return "\n".join(f"--- {m.name}\n{self.said_by(i)}" for i, m in enumerate(self.machines))

    def said_by(self, number: int) -> str:
        return (self.folder / f"{self.machines[number].name}.txt").read_text()


def metrics_of(output: Path) -> list[dict]:
    path = output / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def losses_of(output: Path) -> list[float]:
    return [metrics["loss"] for metrics in metrics_of(output)]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with lab(MACHINES, tmp_path) as there:
        yield Job(tmp_path, there)


@pytest.mark.long
@pytest.mark.parametrize("elastic", [False, True], ids=["plain", "elastic"])
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


def on(number: int) -> str:
    return f"rank {number} (chip NEUTRAL) on machine-{number}"


@pytest.mark.parametrize(
    "lost",
    [
        pytest.param(0, marks=pytest.mark.exhaustive, id="with-the-store"),
        pytest.param(2, marks=pytest.mark.long, id="another"),
    ],
)
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


@pytest.mark.long
def test_a_killed_machine_is_named_and_not_who_noticed(job: Job) -> None:
    job.start("--steps", FOREVER)
    job.until_step(3)
    job.machines[2].kill()
    for number in (0, 1):
        job.wait_for(lambda number=number: job.ended(number), 60)
        (line,) = (line for line in job.said_by(number).splitlines() if " stopped " in line)
        assert line.endswith(f": {on(2)} died or is cut off"), job.said()


@pytest.mark.parametrize(
    ("lost", "how"),
    [
        pytest.param(1, Machine.cut_off, marks=pytest.mark.long),
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


@pytest.mark.long
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
