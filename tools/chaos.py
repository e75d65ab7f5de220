"""Elastic training under disturbances: ranks killed, paused, told to go and added at any moment.

Each seed draws a small cluster, a first plan, how often copies are kept, and 1 to 5 events in the
midst of steps, of saves, of switches and of recoveries; every fifth runs on emulated chips. Every
fourth trains a model with experts, which lie over chips to begin with, and every third cuts
sequences over them, where a stage has several replicas; the next after each of these runs sequences
in slices, where its schedule can. A run must reach its last step on the loss curve of an
undisturbed run, every step once, or say that a layer has no snapshot left where that is so; it must
end in time and leave nothing behind.

With --machines, one to two machines of namespaces are cut off, stopped or killed instead, the
store's among them: then all others must end, and name it first.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer
from chaos_runs import over_machines, strikes
from chaos_runs.events import Events, offer
from chaos_runs.job import start, undisturbed
from chaos_runs.load import load
from chaos_runs.plans import first_plan
from chaos_runs.scene import (
    CURVES,
    DEADLINE_S,
    Curve,
    Scene,
    draw,
    first_chips,
    of_experts,
    write_cluster,
    write_text,
)
from chaos_runs.verdict import PHASES, Verdict, judge
from evidence import Row, row, show
from machines import REFUSED, MachinesError, machines

from heteropp.description.plan import Plan, write_plan
from hyperhetero.cli import CommandLine

START_S = 90.0  # of a job, at most
EVENT_S = 30.0  # that an event costs at most, besides two deadlines
LEFT_S = 10.0  # for processes to be gone after their job

app = CommandLine()
Chips = dict[str, int]  # by node
Curves = Mapping[str, Sequence[float]]  # undisturbed losses, by model


def run(seed: int, folder: Path, text: Path, curves: Curves, deadline_s: float) -> Verdict:
    """One seed, in a folder that is to be made; deadline_s: of the job's waits."""
    scene = draw(seed)
    folder.mkdir()
    chips, sizes, _ = write_files(scene, folder)
    begin_s = time.monotonic()
    job = start(scene, folder, text, deadline_s)
    events = Events(job, chips, sizes)
    try:
        limit_s = START_S + scene.steps + len(scene.events) * (EVENT_S + 2 * deadline_s)
        events.run(begin_s + limit_s)
        ended = job.wait(begin_s + limit_s - time.monotonic())
        seconds = time.monotonic() - begin_s
        left = job.leftovers(LEFT_S) if ended else [f"it did not end within {limit_s:.0f} s"]
    finally:
        events.close()
        job.kill()
    verdict = judge(job, events, curves[scene.curve.model.name], seconds)
    verdict.faults += left + slow(verdict, deadline_s)
    return verdict


def slow(verdict: Verdict, deadline_s: float) -> list[str]:
    """The generations that took too long to train, in sentences.

    Each node of which its cause names a chip, or itself, gives it the time of an event.
    """
    most_s = EVENT_S + 2 * deadline_s
    return [
        f"generation {change.plan.parent.name} took {change.downtime_s:.1f} s to train"
        for change in verdict.changes
        if change.downtime_s > most_s * change.disturbed_nodes
    ]


def run_over_machines(
    seed: int, folder: Path, text: Path, curves: Curves, deadline_s: float, count: int
) -> Verdict:
    """One seed over several machines, each a node. Raises MachinesError."""
    scene = strikes.draw(seed, count, deadline_s)
    folder.mkdir()
    _, sizes, _ = write_files(scene.job, folder)
    with machines(count, folder.parent) as there:
        job = over_machines.MachinesJob(scene, folder, there)
        limit_s = START_S + scene.job.steps + 2 * deadline_s
        verdict = over_machines.run(scene, job, list(sizes), text, curves, limit_s)
    verdict.faults += slow(verdict, deadline_s)
    return verdict


def write_files(scene: Scene, folder: Path) -> tuple[Chips, Chips, Plan]:
    """What the job begins with: the chips that are there, those that may be, and the plan."""
    cluster = write_cluster(scene, folder)
    chips = first_chips(scene, cluster)
    offer(folder, chips)
    there = [m for m in cluster.members if int(m.split("/")[1]) < chips[m.split("/")[0]]]
    plan = first_plan(scene, cluster.kept(map(cluster.rank, there)))
    write_plan(plan, folder / "plan.json")
    sizes = {n: len(node.ranks) for n, node in zip(cluster.node_names, cluster.nodes, strict=True)}
    return chips, sizes, plan


def prepare(folder: Path, wanted: Collection[Curve]) -> tuple[Path, Curves]:
    """The text to train on, and the undisturbed losses."""
    text = write_text(folder / "text")
    curves = {}
    for curve in wanted:
        own = folder / f"undisturbed-{curve.model.name}"
        own.mkdir()
        curves[curve.model.name] = undisturbed(curve, own, text)
    return text, curves


def account(verdict: Verdict, folder: Path) -> str:
    """A run in a line, and what is wrong with it in others."""
    events = ", ".join(f"{one} (in {place})" for one, place in verdict.happened)
    lines = [
        f"seed {verdict.seed}: {verdict.outcome}, {verdict.seconds:.0f} s, "
        f"{len(verdict.changes)} generations, longest downtime {verdict.downtime_s:.1f} s, "
        f"{verdict.steps_again} steps again, "
        f"losses within {verdict.worst:.1g}: {events or 'nothing happened'}"
    ]
    lines += [f"  {fault}" for fault in verdict.faults]
    if verdict.faults:
        lines.append(f"  its files are in {folder}")
    return "\n".join(lines)


def rows(verdicts: Sequence[Verdict]) -> list[Row]:
    right = sum(not verdict.faults for verdict in verdicts)
    reached, lost = _count(verdicts, "reached"), _count(verdicts, "lost")
    ended = _count(verdicts, "ended")
    share = 100 * right / len(verdicts)
    found = [
        row("runs that end as they must", "%", share, bar=100, better="higher"),
        row("runs that reach their last step", "runs", reached, better="higher"),
        row("runs that lost all copies of a layer", "runs", lost),
        row("runs that lost their store's machine", "runs", ended),
        row("longest time without a step", "s", max(v.downtime_s for v in verdicts)),
        row("most steps trained again after a loss", "steps", max(v.steps_again for v in verdicts)),
        row("losses off the undisturbed run's", "x", max(v.worst for v in verdicts)),
    ]  # fmt: skip
    hit = Counter(place for v in verdicts for one, place in v.happened if one.whom)
    return found + [row(f"events in {p}", "events", hit[p], better="higher") for p in PHASES]


def _count(verdicts: Sequence[Verdict], outcome: str) -> int:
    return sum(verdict.outcome == outcome for verdict in verdicts)


@app.command(
    help=__doc__,
    epilog="Examples:  tools/chaos --runs 50 --seed 0  |  tools/chaos --seed 17 --runs 1 --load 3"
    "  |  tools/chaos --machines 3 --runs 30",
)
def main(
    runs: Annotated[int, typer.Option(min=1, help="How many runs; each has the next seed.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first run.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    busy: Annotated[
        int, typer.Option("--load", min=0, help="Processes that compute beside the runs.")
    ] = 0,
    machines_: Annotated[
        int | None,
        typer.Option(
            "--machines",
            min=2,
            help="Spread each run over so many machines of tools/machines, which are cut off, "
            "stopped and killed; its ranks are not disturbed otherwise.",
        ),
    ] = None,
    deadline: Annotated[
        float, typer.Option(min=5, help="Seconds that a rank waits for another.")
    ] = DEADLINE_S,
    json: Annotated[bool, typer.Option("--json", help="Print the evidence as JSON.")] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the files of runs that went well, too.")
    ] = False,
) -> None:
    root = Path(tempfile.mkdtemp(prefix="chaos-"))
    text, curves = prepare(root, (*CURVES, of_experts()))

    def one(number: int) -> Verdict:
        folder = root / f"seed-{number}"
        if machines_ is None:
            verdict = run(number, folder, text, curves, deadline)
        else:
            verdict = run_over_machines(number, folder, text, curves, deadline, machines_)
        print(account(verdict, folder), file=sys.stderr, flush=True)
        if not (verdict.faults or keep):
            shutil.rmtree(folder)
        return verdict

    try:
        with load(busy), ThreadPoolExecutor(jobs) as pool:
            verdicts = list(pool.map(one, range(seed, seed + runs)))
    except MachinesError as error:
        print(f"chaos: {error}", file=sys.stderr)
        raise typer.Exit(REFUSED) from None
    right = not any(verdict.faults for verdict in verdicts)
    if right and not keep:
        shutil.rmtree(root)
    show("chaos", rows(verdicts), [" ".join((__doc__ or "").split())], json)
    raise typer.Exit(0 if right else 1)


if __name__ == "__main__":
    app()
