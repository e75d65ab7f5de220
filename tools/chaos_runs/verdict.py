"""Whether a run ended as it must: at its last step on the undisturbed curve, or honestly.

A run may only stop because a layer has no snapshot left. Whether that is so is found out here from
the last plan that trained, the nodes that were left and how often snapshots were kept, and from the
files that the run left behind.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from chaos_runs.events import Events, Happened, node_of
from chaos_runs.job import Job, listed, read, steps_in
from chaos_runs.scene import Curve

from heteropp.description.plan import read_plan
from heteropp.layout.boxes import Box, uncovered
from heteropp.models.spec import ModelSpec
from heteropp.state.slices.holdings import holdings
from heteropp.state.slices.quantities import STORED, quantities_of

Where = Literal[
    "a step", "a save", "the preparation of a switch", "a switch", "a recovery", "a start"
]
PHASES: tuple[Where, ...] = get_args(Where)
NO_SNAPSHOT = re.compile(
    r"training stopped: .*(no snapshot left|no step has a snapshot of every layer left)"
)
Boxes = dict[tuple[str, str], set[Box]]  # by quantity and parameter


@dataclass
class Change:
    """change.json of a generation, and when it was."""

    start: str
    members: tuple[str, ...]
    step: int
    steps_again: int
    downtime_s: float
    planned_at_s: float  # by the time of day
    done_at_s: float
    plan: Path
    cause: str

    @property
    def disturbed_nodes(self) -> int:
        """How many nodes its cause names, by themselves or their chips; at least one."""
        return max(1, len(set(re.findall(r"\b[a-z]-\d+", self.cause))))

    @property
    def begins_at_s(self) -> float:
        """When it became known, or the last step before it had ended."""
        return min(self.planned_at_s, self.done_at_s - self.downtime_s)


@dataclass
class Verdict:
    seed: int
    seconds: float
    outcome: Literal["reached", "lost", "ended", "wrong"]
    faults: list[str] = field(default_factory=list)
    happened: list[tuple[Happened, Where]] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    worst: float = 0.0  # relative difference of a loss

    @property
    def steps_again(self) -> int:
        """The most that a change cost."""
        return max((change.steps_again for change in self.changes), default=0)

    @property
    def downtime_s(self) -> float:
        """The longest but for the start."""
        return max((change.downtime_s for change in self.changes[1:]), default=0.0)


def judge(job: Job, events: Events, expected: Sequence[float], seconds: float) -> Verdict:
    """expected: the undisturbed losses, of this run's steps or more."""
    changes = read_changes(job.output)
    verdict = Verdict(job.scene.seed, seconds, "wrong", changes=changes)
    verdict.happened = list(zip(events.happened, places(events.happened, changes), strict=True))
    code, stderr = job.process.returncode, read(job.folder / "stderr")
    lines = metrics(job.output)
    if code == 0:
        verdict.outcome = "reached"
        steps = list(range(1, job.scene.steps + 1))
    elif code == 1 and NO_SNAPSHOT.search(stderr):
        verdict.outcome = "lost"
        steps = [line["step"] for line in lines]
        verdict.faults += dishonest(job, events, changes)
        if steps != list(range(1, len(steps) + 1)):
            verdict.faults.append("metrics.jsonl does not have every step once")
    else:
        verdict.faults.append(f"exit code {code}: {' '.join(stderr.split())[-400:]}")
        return verdict
    if (first := stderr.find("Traceback")) >= 0:
        verdict.faults.append(f"a traceback on the terminal:\n{stderr[first:][:4000]}")
    check_losses(verdict, lines, steps, job.scene.curve, expected)
    if not job.memory_seen and events.happened:
        verdict.faults.append("no snapshot was seen in shared memory")
    return verdict


def check_losses(
    verdict: Verdict,
    lines: list[dict[str, Any]],
    steps: Sequence[int],
    curve: Curve,
    expected: Sequence[float],
) -> None:
    """Adds what is wrong with the lines of metrics.jsonl; each of `steps` is to have one."""
    if [line["step"] for line in lines] != list(steps):
        found = ", ".join(str(line["step"]) for line in lines)
        verdict.faults.append(f"metrics.jsonl has steps {found}; expected 1 to {len(steps)} once")
    verdict.worst = worst_difference(lines, expected)
    if not verdict.worst <= curve.tolerance:
        verdict.faults.append(f"a loss is off the undisturbed run's by {verdict.worst:.2g}")


def metrics(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in read(output / "metrics.jsonl").splitlines()]


def worst_difference(lines: list[dict[str, Any]], expected: Sequence[float]) -> float:
    """Relative; infinite where a loss is not finite or not expected."""
    worst = 0.0
    for line in lines:
        loss, step = line["loss"], line["step"]
        if loss is None or not 1 <= step <= len(expected):
            return float("inf")
        worst = max(worst, abs(loss / expected[step - 1] - 1))
    return worst


def read_changes(output: Path) -> list[Change]:
    found = []
    for path in sorted((output / "generations").glob("[0-9]*/change.json")):
        said, plan = json.loads(path.read_text()), path.parent / "plan.json"
        found.append(
            Change(
                start=said["start"],
                members=tuple(said["members"]),
                step=said["step"],
                steps_again=said["steps_again"],
                downtime_s=said["downtime_s"],
                planned_at_s=plan.stat().st_mtime,
                done_at_s=path.stat().st_mtime,
                plan=plan,
                cause=said["cause"],
            )
        )
    return found


def places(happened: Sequence[Happened], changes: list[Change]) -> Iterator[Where]:
    """What the job was at in each event; the first one in a loss's downtime led to it.

    A switch that an event ends has no change of its own: what was seen then has to do.
    """
    led: set[Path] = set()
    for one in happened:
        change = next((c for c in changes[1:] if c.begins_at_s < one.at_s < c.done_at_s), None)
        if changes and one.at_s < changes[0].done_at_s:
            yield "a start"
        elif change and change.start == "switch":
            stands = one.at_s > change.done_at_s - change.downtime_s
            yield "a switch" if stands else "the preparation of a switch"
        elif change and change.plan in led:
            yield "a recovery"
        elif one.changing:
            yield "a switch" if one.standing else "the preparation of a switch"
        else:
            yield "a save" if one.saving else "a step"
        if change:
            led.add(change.plan)


# ---------------------------------------------------------------- were all copies lost?


def dishonest(job: Job, events: Events, changes: list[Change]) -> list[str]:
    """What speaks against "no snapshot left", in sentences."""
    nodes = events.nodes_left()
    found = []
    model = job.scene.curve.model
    tiers = [t for t in job.tiers() if t.name in nodes or t.is_relative_to(job.remote)]
    for folder, held in kept_steps(tiers).items():
        if not missing(model, held):
            found.append(f"it says that no snapshot is left, but {folder} has one of everything")
    if events.torn or not changes:
        return found
    last, reached = changes[-1], len(metrics(job.output))
    memory_every, _, remote_every = job.scene.keep_every
    if remote_every and reached >= 2 * remote_every:
        found.append(f"it says that no snapshot is left, but step {remote_every} was kept remotely")
    if reached - last.step >= 3 * memory_every and not missing(model, held_by(last, nodes)):
        found.append(
            f"it says that no snapshot is left, but {', '.join(sorted(nodes))} held everything"
        )
    return found


def held_by(change: Change, nodes: Collection[str]) -> Boxes:
    """Returns the slices of the state that the members on some nodes hold according to the plan."""
    plan = read_plan(change.plan)
    held: Boxes = defaultdict(set)
    names = {"parameter": "value"} if plan.model.dtype == plan.model.wide_dtype else {}
    for rank, member in enumerate(change.members):
        if node_of(member) in nodes:
            for one in holdings(plan, rank, quantities_of(plan.model)):
                held[names.get(one.quantity.name, one.quantity.name), one.name].add(one.box)
    return held


def kept_steps(folders: Iterable[Path]) -> dict[str, Boxes]:
    """Returns for each step's folder name the slices of the state that files in some tiers hold.

    Parts of files whose checksum is wrong do not count.
    """
    held: dict[str, Boxes] = defaultdict(lambda: defaultdict(set))
    for step in steps_in(*folders):
        for name in listed(step):
            if name.endswith(".json"):
                for key, box in _parts(step, name):
                    held[step.name][key].add(box)
    return held


def _parts(folder: Path, name: str) -> Iterator[tuple[tuple[str, str], Box]]:
    try:
        manifest = json.loads((folder / name).read_text())
    except ValueError:
        return
    for file in manifest["files"]:
        try:
            content = (folder / file["name"]).read_bytes()
        except OSError:
            continue
        for part in file["parts"]:
            if zlib.crc32(content[part["begin"] : part["end"]]) == part["crc32"]:
                ranges = tuple((first, last) for first, last in part["box"]["ranges"])
                yield (part["quantity"], part["name"]), Box(ranges)


def missing(model: ModelSpec, held: Boxes) -> list[str]:
    """Parameters some of whose state nobody holds."""
    found = []
    for parameter in model.parameters():
        name = model.global_name(parameter.name)
        everything = [Box(tuple((0, size) for size in parameter.shape))]
        for quantity in STORED:
            if uncovered(everything, held.get((quantity, name), ())):
                found.append(name)
    return found
