"""Trains a plan for a few steps, as a person would, and gives what its steps came to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from heteropp.description.plan import Plan, write_plan

DEADLINE_S = 600
STOP_S = 60.0  # from the word to stop
SAID = "stderr.txt"
LEAST_FIDELITY = 0.95  # of pacing; a step below is not used


class TrainingError(Exception):
    """A training did not do what it should; the message is one sentence."""


@dataclass
class Training:
    """A heteropp-train process of its own."""

    process: subprocess.Popen[bytes]
    folder: Path
    limit_s: float = DEADLINE_S

    def steps(self) -> list[dict]:
        """The lines of metrics.jsonl but the first, which warms up. Raises TrainingError."""
        return self.all_steps()[1:]

    def all_steps(self) -> list[dict]:
        """The lines of metrics.jsonl. Raises TrainingError."""
        self.finish()
        lines = (self.folder / "run" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def finish(self) -> None:
        """Waits until the process has ended. Raises TrainingError if it failed or is too slow."""
        try:
            self.process.wait(self.limit_s)
        except subprocess.TimeoutExpired:
            self.stop()
            raise TrainingError(f"no end within {self.limit_s:g} s") from None
        if self.process.returncode:
            said = (self.folder / SAID).read_text(errors="replace").strip()
            raise TrainingError(f"exit code {self.process.returncode}: {said[-300:]}")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start_process(
    command: Sequence[object], folder: Path, limit_s: float = DEADLINE_S, **environment: str
) -> Training:
    """Starts a command that is heteropp-train, whose run is folder/run."""
    with (folder / SAID).open("w") as said:
        process = subprocess.Popen(
            list(map(str, command)),
            stdout=subprocess.DEVNULL,
            stderr=said,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
    return Training(process, folder, limit_s)


def well_paced(steps: list[dict]) -> list[dict]:
    """Returns the steps whose pacing fidelity is high enough. Raises TrainingError if none is."""
    paced = [step for step in steps if step["pacing_fidelity"] >= LEAST_FIDELITY]
    if not paced:
        best = max(step["pacing_fidelity"] for step in steps)
        raise TrainingError(f"no step is paced well enough, the best {best:.1%}")
    return paced


def start(
    plan: Plan | Sequence[Plan],
    cluster: Path | None,
    folder: Path,
    steps: int,
    *options: str,
    limit_s: float = DEADLINE_S,
) -> Training:
    """`plan`, or one for each length; `cluster`: its file; `folder`: to be made; `options` of
    heteropp-train; `limit_s`: how long it may take."""
    folder.mkdir()
    option, plans = ("--plan", [plan]) if isinstance(plan, Plan) else ("--bucket", plan)
    files: list[object] = []
    for number, each in enumerate(plans):
        path = folder / f"plan-{number}.json"
        write_plan(each, path)
        files += [option, path]
    command = [
        *(sys.executable, "-m", "heteropp.cli.train", *files),
        *(("--cluster", cluster) if cluster else ()),
        *("--steps", steps, "--output", folder / "run", "--json", *options),
    ]
    return start_process(command, folder, limit_s)
