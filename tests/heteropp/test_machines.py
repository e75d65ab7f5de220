"""A job over three machines, each a set of namespaces: it trains as on one, and ends in time."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import machines
import pytest
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

from heteropp.plan import write_plan

MODEL = tiny_model()
PLAN = make_plan(MODEL, (1, 2, 1), (1, 1, 1), (1, 1, 1), (False, False, False))
MACHINES = PLAN.world_size
NODE = CHIP.removesuffix(".toml")
SETTINGS = ("--warmup-steps", "2", "--decay-steps", "600")
FOREVER = "100000"  # steps
DEADLINE_S = 15

pytestmark = [pytest.mark.long, machines.needed]


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

    def start(self, *arguments: str, elastic: bool = False) -> None:
        for number, machine in enumerate(self.machines):
            extra = ["--elastic", "--node-name", f"{NODE}-{number}"] if elastic else []
            nodes = f"2:{MACHINES}" if elastic else str(MACHINES)
            restarts = ("--max-restarts", "9") if elastic else ()
            timing = "last_call_timeout=15,keep_alive_interval=1,keep_alive_max_attempt=5"
            with (self.folder / f"{machine.name}.txt").open("w") as file:
                torchrun = [
                    *("-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", "1"),
                    *(
                        "--rdzv-backend",
                        "c10d",
                        "--rdzv-endpoint",
                        f"{self.machines[0].name}:29400",
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
        """By all machines, for people."""
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
    with machines.machines(MACHINES, tmp_path) as there:
        yield Job(tmp_path, there)


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


def test_a_killed_machine_is_named_and_not_who_noticed(job: Job) -> None:
    job.start("--steps", FOREVER)
    job.until_step(3)
    job.machines[2].kill()
    for number in (0, 1):
        job.wait_for(lambda number=number: job.ended(number), 60)
        (line,) = (line for line in job.said_by(number).splitlines() if " stopped " in line)
        assert line.endswith(f": {on(2)} died or is cut off"), job.said()
