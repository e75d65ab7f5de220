"""Ranks in C++ that train nothing: what each costs, and what a plan's groups add to it."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from evidence import Row, row

from dicomm import Communicator, FileStore
from dicomm.bench.cpp import SCALE
from scale import Failed
from scale.growth import CPU, MOST_REQUESTS, REQUESTS, STEP_REQUESTS

DEADLINE_S = 600
TRANSPORTS = ("shm", "tcp")
PHASES = ("first", "plan", "step", "mesh", "groups")  # the last two of a job with groups of all
MOST_DESCRIPTORS = 60  # that all groups together add
MOST_BARRIER = 1.3  # times the barrier of before all ranks were connected

Figures = dict[tuple[str, str], float]  # (phase, what) -> of the rank that has the most


def measure(ranks: int, groups: int, transport: str) -> Figures:
    """Runs a job of that size; groups: of all ranks, beside the plan's. Raises Failed."""
    words = [str(SCALE), str(ranks), str(groups), transport]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        why = f"not done after {DEADLINE_S} s"
        raise Failed(f"{ranks} ranks over {transport}: {why}") from None
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or ["it said nothing"])[0]
        raise Failed(f"{ranks} ranks over {transport}: {why}")
    figures: Figures = {}
    for line in done.stdout.splitlines():
        phase, value, what = line.split(" ", 2)
        figures[phase, what] = float(value)
    return figures


def rows_of(ranks: int, groups: int, transport: str, figures: Figures) -> list[Row]:
    """What such a job costs, and its groups of all ranks; with groups above 0."""
    job = f"{ranks} ranks, {transport}"
    states = {
        "first": "",
        "plan": ", a plan's groups",
        "mesh": ", all connected",
        "groups": f", {groups} groups",
    }
    rows = []
    for what, unit in (
        ("threads", "threads"),
        ("descriptors", "descriptors"),
        ("resident MiB", "MiB"),
        ("shared MiB", "MiB"),
    ):
        name = what.removesuffix(" MiB") + (" memory" if unit == "MiB" else "")
        rows += [row(f"{job}{states[p]}: {name}", unit, figures[p, what]) for p in states]
    for what, bar in (("threads", 0), ("descriptors", MOST_DESCRIPTORS)):
        added = figures["groups", what] - figures["mesh", what]
        rows.append(row(f"{job}: {what} that {groups} groups add", what, added, bar=bar))
    for phase, doing in (
        ("first", "start"),
        ("plan", "make and use a plan's groups"),
        ("mesh", "connect all"),
        ("groups", f"make {groups} groups"),
    ):
        rows.append(row(f"{job}: {doing}", "s", figures[phase, "seconds"]))
    requests = {phase: figures[phase, "store requests"] for phase in PHASES}
    for name, count in (
        ("start", requests["first"]),
        ("a plan's groups", requests["plan"] - requests["first"]),
        ("a step", requests["step"] - requests["plan"]),
        ("a group", (requests["groups"] - requests["mesh"]) / groups),
    ):
        rows.append(row(f"{job}: requests of the store, {name}", "requests", count))
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


def with_a_plans_groups(ranks: int, transport: str) -> dict[str, float]:
    """What a rank has once it has made and used a plan's groups, by the names of KINDS.

    Raises Failed.
    """
    figures = measure(ranks, 0, transport)
    steps = figures["step", "mean store requests"] - figures["plan", "mean store requests"]
    return {
        REQUESTS: figures["plan", "mean store requests"],
        MOST_REQUESTS: figures["plan", "store requests"],
        STEP_REQUESTS: steps,
        "threads": figures["step", "threads"],
        "descriptors": figures["step", "descriptors"],
        "memory": figures["step", "resident MiB"],
        CPU: figures["plan", "cpu seconds"],
    }


def kept_mib(ranks: int) -> float:
    """Returns the memory that a rank keeps for all of so many before it is connected with any."""
    with tempfile.TemporaryDirectory() as folder:
        before = _resident_mib()
        job = Communicator(0, ranks, FileStore(folder), secret="secret", listen_address="127.0.0.1")
        kept = _resident_mib() - before
        job.close()
    return kept


def _resident_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024
