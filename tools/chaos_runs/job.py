"""A heteropp-train --elastic process, and what can be seen of it from outside.

Its progress in metrics.jsonl, its generations' folders, the copies of the state as their files come
up, its members by the logs they write to. Nothing in it is told that it is looked at.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_runs.plans import one_rank
from chaos_runs.scene import LONGEST, NOTICE_S, Curve, Scene

import heteropp
from heteropp.description.plan import write_plan

MEMBER_LOG = re.compile(r"/logs/\d+/(\w+-\d+)-(\d+)\.log$")
STEP_FOLDER = re.compile(r"step-(\d+)\.generation-(\d+)")
SHARED_MEMORY = Path("/dev/shm")
UNDISTURBED_S = 600
STANDS_S = 0.05  # without a step, besides twice what the last ones took
STEPS_BEFORE = 5


@dataclass
class Job:
    """A training job; `folder` has its cluster.toml, plan.json, available.json and its results."""

    scene: Scene
    folder: Path
    process: subprocess.Popen[bytes]
    memory_seen: bool = field(default=False)  # that the folder in shared memory was there

    @property
    def output(self) -> Path:
        return self.folder / "run"

    @property
    def over(self) -> bool:
        return self.process.poll() is not None

    @property
    def step(self) -> int:
        """The newest step that was reported; 0 if none was."""
        return max((line["step"] for line in self._lines()[-1:]), default=0)

    def _lines(self) -> list[dict[str, Any]]:
        """Parses the lines of metrics.jsonl, but not a last one that is not yet written whole."""
        text = read(self.output / "metrics.jsonl")
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    @property
    def generation(self) -> int:
        """The newest generation that was planned; 0 if none was."""
        return self._newest("plan.json")

    @property
    def changes(self) -> bool:
        """Whether a generation is planned that has not come to train."""
        return self.generation > self._newest("change.json")

    @property
    def stands(self) -> bool:
        """Whether it changes, and no step has ended for longer than steps take: it may switch."""
        if not self.changes:
            return False
        try:
            ended_s = (self.output / "metrics.jsonl").stat().st_mtime
        except OSError:
            return True
        step_s = max((line["step_s"] for line in self._lines()[-STEPS_BEFORE:]), default=0.0)
        return time.time() - ended_s > max(STANDS_S, 2 * step_s)

    def _newest(self, name: str) -> int:
        """Returns the newest generation that has the file; 0 if none has."""
        return max((int(path.parent.name) for path in self._generations(name)), default=0)

    def _generations(self, name: str) -> Iterator[Path]:
        return (self.output / "generations").glob(f"[0-9]*/{name}")

    def members(self) -> dict[str, int]:
        """Process numbers by name, of those that live."""
        found = {}
        for process in session(self.process.pid):
            with contextlib.suppress(OSError):
                if match := MEMBER_LOG.search(os.readlink(f"/proc/{process}/fd/1")):
                    found[f"{match[1]}/{match[2]}"] = process
        return dict(sorted(found.items()))

    # ------------------------------------------------------------ copies of the state

    @property
    def memory(self) -> Path | None:
        """The job's folder in shared memory, once it is known."""
        try:
            name = json.loads((self.output / "job.json").read_text())["name"]
        except (OSError, ValueError):
            return None
        return SHARED_MEMORY / f"heteropp-{name}"

    def tiers(self) -> list[Path]:
        """Folders that have steps in them: a node's, named by it, and the remote store's."""
        memory = self.memory
        self.memory_seen |= bool(memory and memory.is_dir())
        roots = [memory] if memory else []
        return sorted(
            {step.parent for step in steps_in(*roots, self.output / "copies", self.remote)}
        )

    @property
    def remote(self) -> Path:
        return self.folder / "remote"

    def kept(self) -> dict[Path, tuple[set[str], set[str]]]:
        """Returns for each step's folder the ranks with files in it, and those with a manifest."""
        found = {}
        for step in steps_in(*self.tiers()):
            names = listed(step)
            ranks = {m[0] for name in names if (m := re.search(r"rank-\d+", name))}
            whole = {name.partition(".")[0] for name in names if name.endswith(".json")}
            found[step] = ranks, whole
        return found

    def saving(self) -> bool:
        """Whether some rank has files of a step but no manifest of it yet."""
        return any(ranks - whole for ranks, whole in self.kept().values())

    def newest_kept(self) -> int:
        """The newest step that has a file in some tier."""
        steps = [STEP_FOLDER.fullmatch(folder.name) for folder in self.kept()]
        return max((int(match[1]) for match in steps if match), default=0)

    # ------------------------------------------------------------ its end

    def wait(self, limit_s: float) -> bool:
        """Whether it ends by itself in so long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(limit_s)
        return self.over

    def kill(self) -> None:
        for process in (self.process.pid, *session(self.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()

    def leftovers(self, within_s: float) -> list[str]:
        """What is there of it after its end, in sentences; processes may take a moment."""
        limit_s = time.monotonic() + within_s
        while (left := session(self.process.pid)) and time.monotonic() < limit_s:
            time.sleep(0.05)
        found = [f"process {process} ({name}) is left" for process, name in left.items()]
        if (memory := self.memory) and memory.exists():
            found.append(f"{memory} is left")
        return found


def start(scene: Scene, folder: Path, text: Path, deadline_s: float) -> Job:
    """Starts heteropp-train on the files in `folder` and the data in `text`, in its own session."""
    command = [
        *("--elastic", "--cluster", "cluster.toml", "--availability", "available.json"),
        *("--notice", NOTICE_S, "--deadline", deadline_s, *scene.keeping(folder)),
    ]
    command = train(scene.curve, scene.steps, text) + command + ["--device", scene.device]
    with open(folder / "stdout", "wb") as out, open(folder / "stderr", "wb") as err:
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment(text),
            start_new_session=True,
        )
    return Job(scene, folder, process)


def undisturbed(curve: Curve, folder: Path, text: Path) -> list[float]:
    """The losses of a plain run on one rank, of LONGEST steps."""
    write_plan(one_rank(curve), folder / "plan.json")
    command = [*train(curve, LONGEST, text), "--device", "cpu"]
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=environment(text),
        capture_output=True,
        text=True,
        timeout=UNDISTURBED_S,
    )
    if done.returncode:
        raise RuntimeError(f"the undisturbed run failed: {done.stderr.strip()[-400:]}")
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def train(curve: Curve, steps: int, text: Path) -> list[object]:
    """The command, for a folder with plan.json."""
    return [
        *(sys.executable, "-m", "heteropp.cli.train", "--plan", "plan.json", "--output", "run"),
        *("--data", text, "--steps", steps, "--learning-rate", curve.learning_rate),
        *("--warmup-steps", 2, "--decay-steps", LONGEST, "--gradient-clip", 0.3),
    ]


def environment(text: Path) -> dict[str, str]:
    """The token file of the text is made once, beside it."""
    ours = str(Path(heteropp.__file__).parent.parent)
    found = {name: value for name, value in os.environ.items() if name != "RANK"}
    return {**found, "PYTHONPATH": ours, "XDG_CACHE_HOME": str(text.parent / "cache")}


def session(leader: int) -> dict[int, str]:
    """The living processes of a session but for its leader, and their names."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            name, fields = (folder / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
            state, _, _, owner = fields.split()[:4]
            if int(owner) == leader != int(folder.name) and state not in "ZX":
                found[int(folder.name)] = name
    return found


def steps_in(*roots: Path) -> list[Path]:
    """The folders of steps below some folders, however deep."""
    found = []
    for root in roots:
        for folder, names, _ in os.walk(root):
            steps = [name for name in names if STEP_FOLDER.fullmatch(name)]
            found += [Path(folder, name) for name in steps]
            names[:] = [name for name in names if name not in steps]
    return found


def read(path: Path) -> str:
    """ "" where there is no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""


def listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
