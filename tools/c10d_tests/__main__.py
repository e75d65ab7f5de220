"""Runs PyTorch's own c10d tests on the backend "dicomm" and counts them.

The tests are the installed torch's (torch.testing._internal.distributed.distributed_test): real
processes, four ranks. A test that PyTorch keeps for Gloo or MPI runs too, on dicomm; see gated.py.
With a chip as --device, the tensors that a test makes without naming a device are the chip's.
Each runs in a child with a deadline. What does not apply, and why, is in not_applicable.toml.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from c10d_tests import GATES
from hyperhetero.cli import CommandLine
from hyperhetero.progress import Progress

RULES = Path(__file__).with_name("not_applicable.toml")
IMPORT_S = 120.0  # for a worker to import PyTorch's tests and name them

app = CommandLine()


@dataclass(frozen=True)
class Result:
    name: str
    outcome: str  # passed, failed, not applicable
    reason: str
    seconds: float
    gate: str


@dataclass(frozen=True)
class Rule:
    """Tests that do not apply, by pattern of their name or of what they said when skipped."""

    reason: str
    tests: list[str]
    skipped_with: list[str]

    def covers(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.tests)

    def explains(self, skip: str) -> bool:
        return any(fnmatch.fnmatchcase(skip, pattern) for pattern in self.skipped_with)


def read_rules(device: str) -> list[Rule]:
    rules = tomllib.loads(RULES.read_text())["not_applicable"]
    return [
        Rule(r["reason"], r.get("tests", []), r.get("skipped_with", []))
        for r in rules
        if device != "cpu" or not r.get("of_chips")
    ]


class Worker:
    """A child that runs tests in order; ended with everything it started."""

    def __init__(
        self, gate: str, output: Path, names: list[str], log: Path, deadline_s: float = 120
    ) -> None:
        environment = os.environ | {
            "C10D_TESTS_GATE": gate, "WORLD_SIZE": "4", "OMP_NUM_THREADS": "1",
            "TEMP_DIR": str(output.parent),
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(int(deadline_s * 3 / 4)),  # with a traceback
            "INIT_METHOD": f"file://{output.parent}/init",
        }  # fmt: skip
        self._log = log.open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "c10d_tests.worker", str(output), *names],
            env=environment, cwd=output.parent, stdout=self._log, stderr=self._log,
            start_new_session=True,
        )  # fmt: skip

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()


def list_tests(folder: Path) -> list[str]:
    output, log = folder / "names", folder / "names.log"
    worker = Worker("dicomm", output, [], log)
    try:
        if worker.process.wait(IMPORT_S) != 0:
            raise SystemExit(f"PyTorch's tests cannot be imported:\n{log.read_text()[-2000:]}")
    except subprocess.TimeoutExpired:
        raise SystemExit(f"PyTorch's tests were not imported within {IMPORT_S:g} s") from None
    finally:
        worker.end()
    names: list[str] = json.loads(output.read_text())
    return names


def run_tests(gate: str, names: list[str], deadline_s: float, log: Path) -> Iterator[Result]:
    """Runs the tests under one gate; a test that outlives the deadline takes its worker along."""
    left = list(names)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder, "results")
            output.touch()
            worker = Worker(gate, output, left, log, deadline_s)
            try:
                yield from results_of(worker, gate, output, left, deadline_s)
            finally:
                worker.end()


def results_of(
    worker: Worker, gate: str, output: Path, left: list[str], deadline_s: float
) -> Iterator[Result]:
    """What the worker finishes, which leaves `left`; and the test that it hung or died in."""
    seen, last = 0, time.monotonic()
    while left:
        running = worker.process.poll() is None  # asked before the results are read
        lines = output.read_text().splitlines()
        for line in lines[seen:]:
            found = json.loads(line)
            left.remove(found["name"])
            last = time.monotonic()
            yield Result(gate=gate, **found)
        seen = len(lines)
        waited = time.monotonic() - last
        if left and (waited > deadline_s or not running):
            fate = "hung: ended" if running else "ended its process"
            yield Result(left.pop(0), "failed", f"{fate} after {waited:.0f} s", waited, gate)
            return
        time.sleep(0.05)


def run_gates(names: list[str], device: str, deadline_s: float, log: Path) -> Iterator[Result]:
    """A skipped test gets another try under the next gate, until one opens."""
    rules = read_rules(device)
    for name in names:
        for rule in rules:
            if rule.covers(name):
                yield Result(name, "not applicable", rule.reason, 0, "")
                break
    names = [name for name in names if not any(rule.covers(name) for rule in rules)]
    skips: dict[str, list[str]] = {name: [] for name in names}
    for gate in GATES:
        for result in run_tests(gate, names, deadline_s, log):
            if result.outcome != "skipped":
                yield result
                continue
            skips[result.name].append(result.reason)
            if gate == GATES[-1]:
                yield explained(result, skips[result.name], rules)
        names = [name for name in names if len(skips[name]) == GATES.index(gate) + 1]


def explained(result: Result, skips: list[str], rules: list[Rule]) -> Result:
    for rule in rules:
        if any(rule.explains(skip) for skip in skips):
            return Result(result.name, "not applicable", rule.reason, result.seconds, "")
    unexplained = "skipped, and not_applicable.toml does not say why: " + " / ".join(set(skips))
    return Result(result.name, "failed", unexplained, result.seconds, "")


def report(results: list[Result], as_json: bool) -> None:
    counts = Counter(result.outcome for result in results)
    if as_json:
        rows = [
            {"name": outcome, "unit": "tests", "ours": counts[outcome], "peer": None,
             "peer_name": None, "ratio": None, "bar": 0 if outcome == "failed" else None,
             "better": better}
            for outcome, better in (("passed", "higher"), ("failed", "lower"),
                                    ("not applicable", "lower"))
        ]  # fmt: skip
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        tests = [asdict(result) for result in results]
        print(json.dumps({"tool": "c10d-tests", "machine": machine, "rows": rows, "tests": tests}))
        return
    table = Table("outcome", "tests", "why")
    table.add_row("passed", str(counts["passed"]), "")
    for result in results:
        if result.outcome == "failed":
            table.add_row("failed", result.name, result.reason.strip()[-600:])
    reasons = Counter(r.reason for r in results if r.outcome == "not applicable")
    for reason, count in reasons.most_common():
        table.add_row("not applicable", str(count), reason)
    Console().print(table)
    print(", ".join(f"{counts[o]} {o}" for o in ("passed", "failed", "not applicable")))


@app.command(
    epilog="Examples: tools/c10d-tests | tools/c10d-tests 'test_all_reduce*' | "
    "tools/c10d-tests --slice 1/4 --json | DITORCH_CHIP=b-mini tools/c10d-tests --device device"
)
def main(
    patterns: Annotated[list[str] | None, typer.Argument(help="Names of tests, with *.")] = None,
    slice_: Annotated[
        str, typer.Option("--slice", help="Only the K-th of N parts of the tests: K/N.")
    ] = "1/1",
    deadline_s: Annotated[float, typer.Option(help="Seconds a test may take.")] = 120,
    log: Annotated[Path, typer.Option(help="What the tests print.")] = Path("c10d-tests.log"),
    device: Annotated[
        str, typer.Option(help='Where tensors are: on the "cpu", or on "device", a chip.')
    ] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print the evidence as JSON.")] = False,
) -> None:
    """Runs PyTorch's own c10d tests on the backend "dicomm" and counts them."""
    part, parts = parse_slice(slice_)
    os.environ["C10D_TESTS_DEVICE"] = device  # of the workers
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the workers on the way out
    chosen = choose_tests(patterns or ["*"])[part - 1 :: parts]
    results = []
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("c10d tests", total=len(chosen))
        for result in run_gates(chosen, device, deadline_s, log):
            results.append(result)
            progress.update(task, advance=1, description=result.name[:40])
    report(sorted(results, key=lambda result: result.name), as_json)
    raise SystemExit(1 if any(result.outcome == "failed" for result in results) else 0)


def choose_tests(patterns: list[str]) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        names = list_tests(Path(folder))
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise SystemExit2(f"PyTorch has no c10d test called {pattern}")
    return [name for name in names if any(fnmatch.fnmatchcase(name, p) for p in patterns)]


def parse_slice(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise SystemExit2(f"--slice {text}: expected K/N with 1 <= K <= N, such as 1/4")
    return int(part), int(parts)


class SystemExit2(SystemExit):
    """Bad input: one sentence, exit code 2."""

    def __init__(self, message: str) -> None:
        print(message, file=sys.stderr)
        super().__init__(2)


if __name__ == "__main__":
    app()
