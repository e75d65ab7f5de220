"""Starts heteropp-train --elastic on nodes of two chips, and says what became of it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from layouts import plan_of
from training_run import (
    CHIP,
    NEUTRAL_CHIP,
    Training,
    session,
    start_with,
    tiny_model,
    wait_until_nothing_is_left,
)

from heteropp.description.plan import Plan
from heteropp.models.llama.model import LlamaModel

MODEL = tiny_model()
SIX = plan_of(MODEL, (2, 1, 1), (1, 2, 1), (2, 1, 2))
FIVE = plan_of(MODEL, (2, 1, 1), (1, 1, 1), (2, 1, 2))
STEPS = 600  # more than a test needs
SETTINGS = ("--steps", str(STEPS), "--decay-steps", str(STEPS), "--warmup-steps", "2")
SLOW = "slow.toml"
NODE = CHIP.removesuffix(".toml")  # of which there are three of up to two chips


class Elastic(Training):
    """A run on nodes of two chips each, the last one of what is left."""

    def __init__(
        self,
        folder: Path,
        plan: Plan | None,
        *arguments: str,
        device: str = "cpu",
        capacity_bytes: int = 1 << 30,
        last: str = CHIP,
    ) -> None:
        """plan: None: goes on from what the run's folder says; last: the last node's chip."""
        if plan is None:
            self.output = folder / "run"
            self.process = start_with(folder, "--resume", str(self.output), *arguments)
            return
        write_nodes(folder, plan.world_size, capacity_bytes, last)
        super().__init__(folder, plan, "--elastic", *SETTINGS, *arguments, device=device)

    @property
    def members(self) -> dict[str, int]:
        """The ids of the living members' processes."""
        named = session(self.process.pid)
        return {name: process for process, name in named.items() if name.startswith(NODE)}

    def until(self, step: int, within_s: float = 200) -> None:
        """Waits for a step's metrics."""
        self.wait_for(lambda: steps_of(self.output) >= step, within_s)

    def until_generation(self, number: int, within_s: float = 200) -> None:
        """Waits until a generation trains."""
        self.wait_for(lambda: len(self.changes) >= number, within_s)

    def until_members(self, number: int, within_s: float = 200) -> None:
        """Waits until members of a generation have been started."""
        logs = self.output / "logs" / f"{number:04d}"
        self.wait_for(lambda: logs.exists() and any(logs.iterdir()), within_s)

    def wait_for(self, comes: Callable[[], bool], within_s: float) -> None:
        def or_ended() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            return comes()

        wait_for(or_ended, within_s)

    def send(self, number: int, *members: str) -> None:
        """Sends all of them a signal before one of them ends because of another."""
        processes = [self.members[member] for member in members]
        if number == signal.SIGKILL:
            for process in processes:
                os.kill(process, signal.SIGSTOP)
        for process in processes:
            os.kill(process, number)

    @property
    def changes(self) -> list[dict]:
        return changes_of(self.output)

    @property
    def memory(self) -> Path:
        """Where nodes keep copies in host memory."""
        name = json.loads((self.output / "job.json").read_text())["name"]
        return Path("/dev/shm", f"heteropp-{name}")


def wait_for(comes: Callable[[], bool], within_s: float = 200) -> None:
    deadline = time.monotonic() + within_s
    while not comes():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def changes_of(output: Path) -> list[dict]:
    """What each generation left, oldest first."""
    files = sorted((output / "generations").glob("*/change.json"))
    return [json.loads(file.read_text()) for file in files]


def steps_of(output: Path) -> int:
    """Returns the number of the newest step that has metrics; 0 if there is none."""
    metrics = whole_lines(output / "metrics.jsonl")
    return metrics[-1]["step"] if metrics else 0


def whole_lines(file: Path) -> list[dict]:
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def write_nodes(folder: Path, chips: int, capacity_bytes: int = 1 << 30, last: str = CHIP) -> None:
    chip = NEUTRAL_CHIP.format(chips_per_node=2, capacity_bytes=capacity_bytes)
    (folder / CHIP).write_text(chip)
    (folder / SLOW).write_text(chip.replace("_flops = 1e15", "_flops = 1e3"))
    text = 'name = "test"\n'
    for first in range(0, chips, 2):
        name = last if first + 2 >= chips else CHIP
        text += f'[[nodes]]\nchip = "{name}"\nchips = {min(2, chips - first)}\n'
    (folder / "cluster.toml").write_text(text)


def write_chips(folder: Path, **chips: int) -> None:
    """The availability file; a0=2 is two chips of the first node."""
    counts = {f"{NODE}-{name[1:]}": count for name, count in chips.items()}
    (folder / "new.json").write_text(json.dumps(counts))
    (folder / "new.json").replace(folder / "chips.json")


def said(training: Elastic) -> str:
    """Returns what the training has written to standard output so far."""
    return os.pread(training.process._out.fileno(), 1 << 20, 0).decode()


class Undisturbed:
    """A run on one chip, which stays; it goes on as far as it is asked for."""

    def __init__(self, folder: Path, model: LlamaModel = MODEL, *arguments: str) -> None:
        self.folder, self.model, self.arguments = folder, model, arguments
        self.found: list[float] = []

    def losses(self, steps: int) -> list[float]:
        if steps > len(self.found):
            resume = ("--resume",) if self.found else ()
            arguments = (*SETTINGS, *self.arguments, "--steps", str(steps + 20), *resume)
            plan = plan_of(self.model, (self.model.layers,), (1,), (1,))
            self.found = Training(self.folder, plan, *arguments, device="cpu").finish().losses
        return self.found[:steps]


def assert_as_undisturbed(training: Elastic, undisturbed: Undisturbed, steps: int = 0) -> None:
    """It goes on for some steps, or comes to the end of so many, with the losses it should have.

    Each step is there once, and nothing else is left of it.
    """
    if not steps:
        training.until(training.changes[-1]["step"] + 4)
        training.process.send_signal(signal.SIGTERM)
    code, stdout, stderr = training.wait(250)
    assert code == (0 if steps else 128 + signal.SIGTERM), stdout + stderr
    found = [m["step"] for m in training.metrics]
    assert found == list(range(1, (steps or len(found)) + 1))
    assert training.losses == pytest.approx(undisturbed.losses(len(found)), rel=2e-6)
    assert_nothing_is_left(training)


def assert_nothing_is_left(training: Elastic) -> None:
    wait_until_nothing_is_left(training)
    assert not training.memory.exists()
