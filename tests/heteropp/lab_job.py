"""A job of heteropp-train over the machines of tools/machines, started by torchrun on each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

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

# a step's loss may depend much on its rounding, and here a job trains for as long as others wait
MODEL = tiny_model(dtype="float64")
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
        self.environments: list[dict[str, str]] = [{} for _ in there]  # beside that of all
        chip = NEUTRAL_CHIP.format(chips_per_node=1, capacity_bytes=1 << 30)
        (folder / CHIP).write_text(chip)
        nodes = f'[[nodes]]\nchip = "{CHIP}"\nchips = 1\n' * MACHINES
        (folder / "cluster.toml").write_text('name = "test"\n' + nodes)
        write_plan(PLAN, folder / "plan.json")
        write_text(folder / "text")

    def start(self, *arguments: str, elastic: bool = False, endpoint: int = 0) -> None:
        for number in range(MACHINES):
            self.start_on(number, *arguments, elastic=elastic, endpoint=endpoint)

    def start_on(
        self, number: int, *arguments: str, elastic: bool = False, endpoint: int = 0
    ) -> None:
        """Starts torchrun on one of the machines, once more where it has ended."""
        machine = self.machines[number]
        extra = ["--elastic", "--node-name", f"{NODE}-{number}"] if elastic else []
        nodes = f"2:{MACHINES}" if elastic else str(MACHINES)
        restarts = ("--max-restarts", "9") if elastic else ()
        timing = "last_call_timeout=15,keep_alive_interval=1,keep_alive_max_attempt=5"
        with (self.folder / f"{machine.name}.txt").open("a") as file:
            torchrun = [
                *(sys.executable, "-m", "torch.distributed.run"),
                *("--nnodes", nodes, "--nproc-per-node", "1", "--rdzv-backend", "c10d"),
                *("--rdzv-endpoint", f"{self.machines[endpoint].name}:29400"),
                *("--rdzv-id", "run", "--rdzv-conf", timing, *restarts),
                *("-m", "heteropp.cli.train", *command(self.folder), *extra),
                *("--deadline", str(DEADLINE_S), *SETTINGS, *arguments),
            ]
            shared = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if elastic else {}
            self._start(machine, torchrun, {**shared, **self.environments[number]}, file)

    def start_by(self, lines: Sequence[str]) -> None:
        """Starts a line of the shell on each machine, in the job's folder."""
        for machine, line in zip(self.machines, lines, strict=True):
            shell = ["sh", "-c", f"cd '{self.folder}'; {line}"]
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            with (self.folder / f"{machine.name}.txt").open("w") as file:
                self._start(machine, shell, {"PATH": path}, file)

    def _start(
        self, machine: Machine, command: Sequence[str], own: Mapping[str, str], output: IO[str]
    ) -> None:
        caches = {"XDG_CACHE_HOME": str(self.folder / "cache"), "OMP_NUM_THREADS": "1"}
        # without the secret that a command may have drawn in this very process
        inherited = {name: value for name, value in os.environ.items() if name != "DICOMM_SECRET"}
        self.processes.append(machine.start(command, {**inherited, **caches, **own}, output))

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
        metrics = self.metrics
        steps = ("--steps", str(len(metrics)))
        alone = start(self.folder, "--output", str(self.folder / "alone"), *SETTINGS, *steps)
        code, stdout, stderr = wait(alone, 300)
        assert code == 0, stdout + stderr
        expected = metrics_of(self.folder / "alone")
        assert [m["step"] for m in metrics] == [m["step"] for m in expected]
        losses = [m["loss"] for m in metrics]
        assert losses == pytest.approx([m["loss"] for m in expected], rel=2e-6)

    def until_step(self, step: int, within_s: float = 150) -> None:
        self.wait_for(lambda: len(self.metrics) >= step, within_s)

    def wait_for(self, comes: Callable[[], bool], within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while not comes():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def started(self) -> list[dict[str, str]]:
        """Returns the environment of each process that torchrun started for this job."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it has ended
                words = [
                    word.partition("=") for word in path.read_text(errors="replace").split("\0")
                ]
                found.append({name: value for name, _, value in words})
        caches = str(self.folder / "cache")
        return [e for e in found if e.get("XDG_CACHE_HOME") == caches and "MASTER_PORT" in e]

    def members_on(self, number: int) -> list[int]:
        """Returns the processes of an elastic job's member on a machine."""
        caches = f"XDG_CACHE_HOME={self.folder / 'cache'}"
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                is_member = (path / "comm").read_text() == f"{NODE}-{number}/0\n"
                if is_member and caches in (path / "environ").read_text().split("\0"):
                    found.append(int(path.name))
        return found

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


@contextmanager
def lab_job(folder: Path) -> Iterator[Job]:
    with lab(MACHINES, folder) as there:
        yield Job(folder, there)
