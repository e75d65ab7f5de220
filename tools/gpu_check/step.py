"""One step in a process of its own, and what waits for it no longer than its time limit."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from gpu_check.part import Found, Part
from gpu_check.processes import StepError, last_line

UNHURRIED = 4  # times longer than a GPU's machine a rehearsal's may take


@dataclass(frozen=True)
class Step:
    """name: of a module of this package, whose function `found` is the step."""

    name: str
    limit_s: float


STEPS = (  # ten minutes together
    Step("builds", 30),
    Step("conform", 105),
    Step("losses", 50),
    Step("messages", 45),
    Step("training", 100),
    Step("degrees", 120),
    Step("prediction", 150),
)


def perform(step: Step, part: Part, folder: Path) -> Found:
    """Runs a step in a process of its own. Raises StepError."""
    limit_s = step.limit_s * (UNHURRIED if part.is_rehearsed else 1)
    place, result = folder / step.name, folder / f"{step.name}.json"
    place.mkdir()
    command = [sys.executable, "-P", "-m", "gpu_check.step", step.name]
    with (folder / f"{step.name}.txt").open("w+") as errors:
        process = subprocess.Popen(
            [*command, json.dumps(asdict(part)), str(place), str(result)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise StepError(f"it did not end within {limit_s:g} s") from None
        finally:
            _kill_all(process)
        if process.returncode:
            raise StepError(last_line(errors))
    return Found(**json.loads(result.read_text()))


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kills what is left of a step: its session has its process's number."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(name: str, part: str, folder: str, result: str) -> int:
    """The step's process: the last line of its standard error is why it failed."""
    step = importlib.import_module(f"gpu_check.{name}")
    try:
        found = step.found(Part(**json.loads(part)), Path(folder))
    except StepError as error:
        print(error, file=sys.stderr)
        return 1
    Path(result).write_text(json.dumps(asdict(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
