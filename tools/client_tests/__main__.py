"""Runs other people's test suites on a chip and on the CPU, and counts what passes.

A test fails here where it fails on the chip and passes on the CPU. What is skipped, or fails on
the CPU too, does not apply; not_applicable.toml explains the rest.
"""

from __future__ import annotations

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from c10d_tests.__main__ import SystemExit2, parse_slice
from rich.console import Console
from rich.table import Table

from client_tests.renamed import renamed
from client_tests.suites import SUITES, Suite
from hyperhetero.cli import CommandLine

RULES = Path(__file__).with_name("not_applicable.toml")

app = CommandLine()


@dataclass(frozen=True)
class Result:
    name: str
    outcome: str  # passed, failed, skipped; after the comparison "not applicable" for skipped
    reason: str


@dataclass(frozen=True)
class Run:
    """One suite's files, on one device."""

    suite: Suite
    source: Path
    files: list[str]
    chip: str | None  # None is the CPU
    device_type: str
    slice_: str
    select: str
    deadline_s: float
    log: Path

    def results(self) -> dict[str, Result]:
        """Each test once; one that ends or outlives its process has failed, and the rest go on."""
        found: dict[str, Result] = {}
        with tempfile.TemporaryDirectory() as folder:
            for entry in self.source.iterdir():
                (Path(folder) / entry.name).symlink_to(entry)
            while (fate := self._child(Path(folder), found)) is not None:
                begun, how = fate
                found[begun] = Result(begun, "failed", how)
        return found

    def _child(self, folder: Path, found: dict[str, Result]) -> tuple[str, str] | None:
        """Runs what is not in `found` and adds to it; returns the test that a child died in."""
        output, done = folder / "output", folder / "done"
        output.write_text("")
        done.write_text("\n".join(found))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "client_tests.plugin"]
        command += ["-p", "no:cacheprovider", "-p", "no:timeout", f"--rootdir={self.source}"]
        command += [str(self.source / name) for name in self.files]
        command += ["-k", self.select] if self.select else []
        with self.log.open("ab") as log:
            child = subprocess.Popen(
                command, cwd=folder, env=self._environment(folder, output, done),
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
            try:
                begun, idle_s = self._watch(child, output)
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        finished = False
        for text in output.read_text().splitlines():
            said = json.loads(text)
            finished |= "finished" in said
            if "name" in said:
                result = Result(said["name"], said["outcome"], said["reason"])
                if result.name not in found or found[result.name].outcome != "failed":
                    found[result.name] = result
        if finished or not begun:
            if not found:
                raise SystemExit2(f"no test ran; {self.log} says why")
            return None
        return begun, f"hung for {idle_s:.0f} s" if idle_s else "ended its process"

    def _watch(self, child: subprocess.Popen[bytes], output: Path) -> tuple[str, float]:
        """Waits; returns the last test and, if it was silent for too long, for how many seconds."""
        seen, since = "", time.monotonic()
        while True:
            running = child.poll() is None
            lines = output.read_text().splitlines()
            last = lines[-1] if lines else ""
            if last != seen:
                seen, since = last, time.monotonic()
            idle_s = time.monotonic() - since
            if not running or idle_s > self.deadline_s:
                begun = [said["begun"] for said in map(json.loads, lines) if "begun" in said]
                return (begun[-1] if begun else ""), (idle_s if running else 0.0)
            time.sleep(0.1)

    def _environment(self, folder: Path, output: Path, done: Path) -> dict[str, str]:
        chosen = {k: v for k, v in os.environ.items() if not k.startswith("DITORCH_")}
        chosen |= self.suite.environment(self.device_type, folder)
        if self.chip is not None:
            chosen |= {"DITORCH_CHIP": self.chip, "DITORCH_AUTOLOAD": "1"}  # for its processes too
        paths = [os.environ.get("PYTHONPATH", ""), str(self.source / "src"), str(self.source)]
        return chosen | {
            "PYTHONPATH": os.pathsep.join(paths),
            "CLIENT_TESTS_OUTPUT": str(output), "CLIENT_TESTS_DONE": str(done),
            "CLIENT_TESTS_SLICE": self.slice_, "CLIENT_TESTS_DEVICE": self.device_type,
            "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip


def compare(chip: dict[str, Result], cpu: dict[str, Result]) -> list[Result]:
    rules = tomllib.loads(RULES.read_text())["not_applicable"]
    compared = []
    for name, result in sorted(chip.items()):
        if result.outcome == "skipped":
            compared.append(Result(name, "not applicable", f"skipped: {result.reason[:120]}"))
        elif result.outcome == "failed" and name in cpu and cpu[name].outcome == "failed":
            compared.append(Result(name, "not applicable", "fails on the CPU too"))
        else:
            compared.append(explained(result, rules))
    return compared


def device_type_of(chip: str) -> str:
    """What torch calls the chip's device, as a process that is given the chip finds it."""
    asked = subprocess.run(
        [sys.executable, "-c", "import ditorch; print(ditorch.device.type)"],
        env=os.environ | {"DITORCH_CHIP": chip}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if asked.returncode:
        raise SystemExit2(f"--chip {chip}: {asked.stderr.strip().splitlines()[-1]}")
    return asked.stdout.split()[-1]


def explained(result: Result, rules: list[dict]) -> Result:
    if result.outcome == "failed":
        for rule in rules:
            tests, says = rule.get("tests", ["*"]), rule.get("says", "")
            named = any(fnmatch.fnmatchcase(result.name, pattern) for pattern in tests)
            if named and says in result.reason:
                return Result(result.name, "not applicable", rule["reason"])
    return result


def report(suite: str, chip: str, results: list[Result], as_json: bool) -> None:
    counts = Counter(result.outcome for result in results)
    outcomes = ("passed", "failed", "not applicable")
    if as_json:
        rows = [
            {"name": outcome, "unit": "tests", "ours": counts[outcome], "peer": None,
             "peer_name": None, "ratio": None, "bar": 0 if outcome == "failed" else None,
             "better": "higher" if outcome == "passed" else "lower"}
            for outcome in outcomes
        ]  # fmt: skip
        machine = f"{platform.machine()}, {os.cpu_count()} cores, {suite} on chip {chip}"
        tests = [asdict(result) for result in results]
        print(
            json.dumps({"tool": "client-tests", "machine": machine, "rows": rows, "tests": tests})
        )
        return
    table = Table("outcome", "tests", "why")
    table.add_row("passed", str(counts["passed"]), "")
    for result in results:
        if result.outcome == "failed":
            table.add_row("failed", result.name, result.reason.strip()[-300:])
    reasons = Counter(r.reason for r in results if r.outcome == "not applicable")
    for reason, count in reasons.most_common():
        table.add_row("not applicable", str(count), reason)
    Console().print(table)
    print(f"{suite} on chip {chip}: " + ", ".join(f"{counts[o]} {o}" for o in outcomes))


@app.command(
    epilog="Examples: tools/client-tests transformers --source ~/transformers | tools/client-tests "
    "pytorch --source ~/pytorch test/test_view_ops.py --slice 1/4 --json"
)
def main(
    suite: Annotated[str, typer.Argument(help="pytorch, transformers, accelerate or peft.")],
    files: Annotated[list[str] | None, typer.Argument(help="Its files; default: some.")] = None,
    source: Annotated[Path, typer.Option(help="The suite's repository.")] = Path("."),
    chip: Annotated[str, typer.Option(help="A preset or a chip file.")] = "b",
    written_for: Annotated[
        str, typer.Option(help="The device that the files name, such as npu: read as this one.")
    ] = "",
    select: Annotated[str, typer.Option("-k", help="As pytest's -k.")] = "",
    slice_: Annotated[str, typer.Option("--slice", help="The K-th of N parts: K/N.")] = "1/1",
    deadline_s: Annotated[float, typer.Option(help="Seconds a test may take.")] = 120,
    log: Annotated[Path, typer.Option(help="What pytest prints.")] = Path("client-tests.log"),
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Runs a library's own tests on a chip and on the CPU, and counts them."""
    if suite not in SUITES:
        raise SystemExit2(f"{suite} is no suite: expected one of {', '.join(SUITES)}")
    parse_slice(slice_)
    chosen = SUITES[suite]
    if not (source / chosen.needs).is_dir():
        raise SystemExit2(
            f"--source {source} has no folder {chosen.needs!r}: expected the repository of "
            f"{suite}, as the installed package does not bring its tests"
        )
    names = files or list(chosen.default)
    if missing := [name for name in names if not (source / name).is_file()]:
        raise SystemExit2(f"--source {source} has no {', '.join(missing)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as copies:
        ran = []
        for on, device_type in ((chip, device_type_of(chip)), (None, "cpu")):
            folder = source.resolve()
            if written_for:
                folder = renamed(folder, chosen.needs, Path(copies), written_for, device_type)
            run = Run(
                chosen, folder, names, on, device_type, slice_, select, deadline_s, log.resolve()
            )
            ran.append(run.results())
    results = compare(*ran)
    report(suite, chip, results, as_json)
    raise SystemExit(1 if any(result.outcome == "failed" for result in results) else 0)


if __name__ == "__main__":
    app()
