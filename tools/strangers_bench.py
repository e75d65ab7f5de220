"""What strangers cost a running training job: nothing of its losses, and how much of its time?

The quickstart's job of six ranks trains over TCP, twice: alone, and while a crowd of strangers
comes and goes in turns, a few steps each. They call every port that the job listens on, those of
torch's stores included: silent, dripping a byte at a time, talking garbage, with a hello and no
more, and with handshakes that were recorded; whoever is hung up on calls again. Their own work is
done on this machine, too, and counts as the job's loss of time.
"""

from __future__ import annotations

import json
import os
import resource
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import psutil
import typer
from evidence import Row, row, show

from dicomm.bench.quiet import Quiet, Watch
from hyperhetero.cli import CommandLine

app = CommandLine()

CLUSTER, MODEL = "quickstart", "quickstart"
WARM_UP, TURN = 3, 5  # steps
DEADLINE_S = 600
ASKED = 1.10
PLANNING = ["--global-batch", "16", "--micro-batch-per-replica", "2"]


class Failed(Exception):
    """The training did not do what it should; the message is one sentence."""


class Training:
    """A heteropp-train process."""

    def __init__(self, folder: Path, name: str, steps: int, secret: str) -> None:
        self.folder = folder / name
        command = [sys.executable, "-m", "heteropp.cli.train", "--plan", folder / "plan.json"]
        command += ["--cluster", CLUSTER, "--steps", steps, "--output", self.folder, "--json"]
        self.log = folder / f"{name}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "DICOMM_TRANSPORT": "tcp", "DICOMM_SECRET": secret},
            )

    def steps(self) -> list[dict]:
        try:
            lines = (self.folder / "metrics.jsonl").read_text().split("\n")[:-1]
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines]

    def wait_for(self, steps: int) -> None:
        """Waits until `steps` are done or the process ends; raises Failed after DEADLINE_S."""
        deadline = time.monotonic() + DEADLINE_S
        while len(self.steps()) < steps and self.process.poll() is None:
            if time.monotonic() > deadline:
                raise Failed(f"step {steps} was not done within {DEADLINE_S} s")
            time.sleep(0.02)

    def finish(self) -> list[dict]:
        """Waits until the process has ended and returns its steps' metrics. Raises Failed."""
        try:
            code = self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise Failed(f"the job did not end within {DEADLINE_S} s") from None
        if code:
            last = self.log.read_text().strip()[-500:]
            raise Failed(f"the job ended with exit code {code}: {last}")
        return self.steps()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait()

    def cpu_s(self) -> float:
        """Processor time of its processes so far."""
        leader = psutil.Process(self.process.pid)
        times = [each.cpu_times() for each in [leader, *leader.children(recursive=True)]]
        return sum(each.user + each.system for each in times)

    def addresses(self) -> list[tuple[str, int]]:
        """Returns the addresses that its processes listen on."""
        found = set()
        leader = psutil.Process(self.process.pid)
        for process in [leader, *leader.children(recursive=True)]:
            for each in process.net_connections(kind="tcp"):
                if each.status == psutil.CONN_LISTEN:
                    found.add((_reached_at(each.laddr.ip), each.laddr.port))
        return sorted(found)


def _reached_at(listening: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listening, listening)


class Strangers:
    """A process of their own."""

    def __init__(
        self, addresses: list[tuple[str, int]], count: int, calls_per_s: float, secret: str
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "strangers.callers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent,
        )
        order = {"addresses": addresses, "count": count, "calls_per_s": calls_per_s}
        self._write(json.dumps({**order, "secret": secret}))
        assert self.process.stdout
        if not self.process.stdout.readline():
            raise Failed("the strangers' process ended early")

    def _write(self, line: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def come(self) -> None:
        self._write("come")

    def go(self) -> None:
        self._write("go")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def stopped(what: Training | Strangers) -> Iterator[None]:
    try:
        yield
    finally:
        what.stop() if isinstance(what, Training) else what.end()


@dataclass
class Visits:
    """of what: with strangers, and without. steps: their numbers; cpu_s: a step's, turn by turn."""

    steps: dict[bool, set[int]] = field(default_factory=lambda: {True: set(), False: set()})
    cpu_s: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})


def visited(job: Training, steps: int, count: int, calls_per_s: float, secret: str) -> Visits:
    """Lets strangers connect in every other turn of TURN steps until the end. Raises Failed."""
    job.wait_for(WARM_UP)
    if job.process.poll() is not None:
        job.finish()
        raise Failed("the job ended before a stranger could come")
    strangers = Strangers(job.addresses(), count, calls_per_s, secret)
    visits = Visits()
    with stopped(strangers):
        here = False
        while (first := len(job.steps())) + TURN < steps and job.process.poll() is None:
            here = not here
            strangers.come() if here else strangers.go()
            before_s = job.cpu_s()
            job.wait_for(first + TURN)
            last = len(job.steps())
            if job.process.poll() is None:
                visits.cpu_s[here].append((job.cpu_s() - before_s) / (last - first))
            # the step in which they came or went is neither
            visits.steps[here] |= set(range(first + 1, last))
    return visits


def rows_of(steps: int, count: int, calls_per_s: float) -> tuple[list[Row], Quiet]:
    """Raises Failed."""
    secret = secrets.token_hex(32)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        search = [sys.executable, "-m", "heteropp.cli.search", "--cluster", CLUSTER]
        search += ["--model", MODEL, *PLANNING, "--output", str(folder / "plan.json")]
        ended = subprocess.run(search, capture_output=True, text=True)
        if ended.returncode:
            raise Failed(f"no plan: {ended.stderr.strip()[-300:]}")
        alone = Training(folder, "alone", steps, secret)
        with stopped(alone):
            expected = alone.finish()
        job = Training(folder, "visited", steps, secret)
        watch = Watch()
        with stopped(job):
            visits = visited(job, steps, count, calls_per_s, secret)
            quiet = watch.result()
            found = job.finish()
    wrong = sum(a["loss"] != b["loss"] for a, b in zip(expected, found, strict=True))
    if not all(visits.steps.values()) or not all(visits.cpu_s.values()):
        raise Failed(f"{steps} steps were too few for strangers to come and go: give more")
    step_s, without_step_s = (
        statistics.median(found[i]["step_s"] for i in visits.steps[here]) for here in (True, False)
    )
    cpu_s, without_cpu_s = (statistics.median(visits.cpu_s[here]) for here in (True, False))
    without = "the turns between without them"
    return [
        row("losses that differ from those of the job alone", "steps", wrong, bar=0),
        row(f"a step with {count} strangers", "s", step_s, peer=without_step_s, peer_name=without),
        row("a step with strangers, of one without", "x", step_s / without_step_s, bar=ASKED),
        row("processor time of such a step", "s", cpu_s, peer=without_cpu_s, peer_name=without),
    ], quiet


@app.command(help=__doc__, epilog="Example:  tools/strangers-bench --steps 60")
def main(
    steps: Annotated[int, typer.Option(min=30, help="Steps of each job.")] = 60,
    count: Annotated[int, typer.Option(min=1, help="Connections at a time.")] = 2000,
    calls_per_s: Annotated[
        float, typer.Option(min=0, help="Calls a second, once all have called.")
    ] = 100,
    json: Annotated[bool, typer.Option("--json", help="Print the evidence as JSON.")] = False,
) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + 100
    if hard < needed:
        print(f"strangers-bench: {count} connections need ulimit -Hn {needed}", file=sys.stderr)
        raise typer.Exit(2)
    try:
        rows, quiet = rows_of(steps, count, calls_per_s)
    except Failed as error:
        print(f"strangers-bench: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    show("strangers-bench", rows, [" ".join((__doc__ or "").split())], json, quiet)
    if rows[0]["ours"]:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
