"""What ranks and groups cost: threads, descriptors, memory, requests of the store, start-up.

The ranks are those of dicomm-scale, in C++, and train nothing. They run on this host, all of them,
so that the figures of one rank are those of a job of that size, but its times are those of as many
ranks on these cores.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import typer
from evidence import Row, row, show

from dicomm.bench.cpp import SCALE, why_absent
from dicomm.bench.quiet import Quiet, Watch
from hyperhetero.cli import CommandLine

app = CommandLine()
DEADLINE_S = 600
TRANSPORTS = ("shm", "tcp")
PHASES = ("first", "mesh", "groups")
MOST_DESCRIPTORS = 60  # that all groups together add
MOST_BARRIER = 1.3  # times the barrier of before all ranks were connected

Figures = dict[tuple[str, str], float]  # (phase, what) -> of the rank that has the most


def measure(ranks: int, groups: int, transport: str) -> Figures:
    """Runs a job of that size; exits where it fails."""
    words = [str(SCALE), str(ranks), str(groups), transport]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S)
        why = (done.stderr.strip().splitlines() or ["it said nothing"])[0]
    except subprocess.TimeoutExpired:
        done, why = None, f"not done after {DEADLINE_S} s"
    if done is None or done.returncode != 0:
        print(f"scale-bench: {ranks} ranks over {transport}: {why}", file=sys.stderr)
        raise typer.Exit(1)
    figures: Figures = {}
    for line in done.stdout.splitlines():
        phase, value, what = line.split(" ", 2)
        figures[phase, what] = float(value)
    return figures


def rows_of(ranks: int, groups: int, transport: str, figures: Figures) -> list[Row]:
    job = f"{ranks} ranks, {transport}"
    states = dict(zip(PHASES, ("", ", all connected", f", {groups} groups"), strict=True))
    rows = []
    for what, unit in (
        ("threads", "threads"),
        ("descriptors", "descriptors"),
        ("resident MiB", "MiB"),
        ("shared MiB", "MiB"),
    ):
        name = what.removesuffix(" MiB") + (" memory" if unit == "MiB" else "")
        rows += [row(f"{job}{states[p]}: {name}", unit, figures[p, what]) for p in PHASES]
    for what, bar in (("threads", 0), ("descriptors", MOST_DESCRIPTORS)):
        added = figures["groups", what] - figures["mesh", what]
        rows.append(row(f"{job}: {what} that {groups} groups add", what, added, bar=bar))
    for phase, doing in zip(PHASES, ("start", "connect all", f"make {groups} groups"), strict=True):
        rows.append(row(f"{job}: {doing}", "s", figures[phase, "seconds"]))
    requests = [figures[phase, "store requests"] for phase in PHASES]
    rows.append(row(f"{job}: requests of the store, start", "requests", requests[0]))
    if groups:
        each = (requests[2] - requests[1]) / groups
        rows.append(row(f"{job}: requests of the store, a group", "requests", each))
    before = figures["first", "barrier us"]
    for phase, state in (("mesh", "all are connected"), ("groups", f"{groups} groups were made")):
        rows.append(
            row(
                f"{job}: barrier after {state}",
                "us",
                figures[phase, "barrier us"],
                peer=before,
                peer_name="the same before",
                bar=MOST_BARRIER * before,
            )
        )
    return rows


@app.command(epilog="Examples:  tools/scale-bench  |  tools/scale-bench --ranks 128 --json")
def main(
    ranks: Annotated[int, typer.Option(min=2, max=1024, help="Ranks, all on this host.")] = 16,
    groups: Annotated[int, typer.Option(min=0, help="Groups of all ranks, beside the first.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print evidence for machines.")] = False,
) -> None:
    """What a job's ranks and groups cost: threads, descriptors, memory, start-up; C++ ranks."""
    if why := why_absent(SCALE):
        print(f"scale-bench: {why}", file=sys.stderr)
        raise typer.Exit(2)
    watch, rows = Watch(), []
    for transport in TRANSPORTS:
        rows += rows_of(ranks, groups, transport, measure(ranks, groups, transport))
        watch.spin()
    quiet: Quiet = watch.result()
    notes = [
        "figures are those of the rank that has the most; shared memory is counted for both of "
        "the ranks that share it, whether they use it or not, and resident memory as they use it",
        "a rank's requests of the store: of Communicator::create() and subgroup(), and its peers' "
        "contacts",
    ]
    show("scale-bench", rows, notes, as_json, quiet)


if __name__ == "__main__":
    app()
