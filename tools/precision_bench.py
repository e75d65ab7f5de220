"""What the precision tools cost, and what `import ditorch` costs where none is open.

The first: steps of a small Llama with each tool against the bare step, in turn in one process.
The second: single operators on the CPU after `import torch` alone and after `import ditorch`, in
processes of their own, turn by turn. Medians; steps in wall time, operators in the thread's own.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from small_llama import training_step

from hyperhetero.cli import CommandLine

app = CommandLine()
DEADLINE_S = 600
NOISE_BAR = 1.05

Samples = dict[str, list[float]]


# --- measured in child processes ---------------------------------------------------------------


def measure_steps(rounds: int) -> Samples:
    """Seconds of a training step on this process's chip, by the tool that looks on."""
    import ditorch

    step = training_step(ditorch.device, dim=128, length=64)
    seconds: Samples = defaultdict(list)
    with TemporaryDirectory() as folder:
        tools = make_tools(Path(folder))
        for tool in tools.values():  # warms up
            with tool():
                step()
        for _ in range(rounds):
            for name, tool in tools.items():
                with ExitStack() as opened:
                    opened.enter_context(tool())
                    step()  # the first one under a tool is not typical
                    start = time.perf_counter()
                    step()
                    opened.close()  # some tools still have to write then
                    seconds[name].append(time.perf_counter() - start)
    return seconds


def make_tools(folder: Path) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    from ditorch.precision.cast import Cast
    from ditorch.precision.fallback import Fallback
    from ditorch.precision.overflow import FindOverflow
    from ditorch.precision.settings import tool_class
    from ditorch.precision.timing import MeasureTime
    from ditorch.precision.tool import Tool

    class Nothing(Tool):
        """The least that any tool costs."""

        rank_in_line = 0

        def __init__(self) -> None:
            super().__init__()

        def around(self, call: Any, proceed: Any) -> Any:
            return proceed(call)

    tools: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "bare": nullcontext,
        "a tool that does nothing": Nothing,
        "MeasureTime": MeasureTime,
        "MeasureTime with a trace": lambda: MeasureTime(trace=folder / "trace.json"),
        "FindOverflow": FindOverflow,
        "Cast of mm to float64": lambda: Cast(operators="mm", dtype="float64"),
        "Fallback of mm": lambda: Fallback(operators="mm"),
        "Fallback of all": lambda: Fallback(operators="*"),
    }
    if find_spec("ditorch.precision.observe"):
        tools["Observe"] = lambda: tool_class("observe")()
    if find_spec("ditorch.precision.compare"):
        tools["Compare"] = lambda: tool_class("compare")()
    if find_spec("ditorch.precision.capture"):
        capture: Any = tool_class("capture")
        for kept in ("none", "all"):
            tools[f"Capture, tensors={kept}"] = lambda kept=kept: capture(
                output=folder / f"capture-{kept}", tensors=kept, existing="overwrite"
            )
    return tools


def measure_operators(with_ditorch: bool) -> Samples:
    """Seconds of one call on the CPU, with no tool open."""
    import torch

    if with_ditorch:
        import ditorch  # noqa: F401
    torch.set_num_threads(1)
    small, matrix = torch.ones(4), torch.ones(16, 16)
    operators: dict[str, Callable[[], Any]] = {
        "add": lambda: small + small,
        "mm": lambda: matrix @ matrix,
        "add_": lambda: small.add_(1.0),
        "view": lambda: small.view(2, 2),
        "zeros": lambda: torch.zeros(4, device="cpu"),
    }
    calls = 20_000
    seconds: Samples = {}
    for name, operator in operators.items():
        repeats = []
        for _ in range(7):
            start = time.thread_time()  # does not count what other processes take
            for _ in range(calls):
                operator()
            repeats.append((time.thread_time() - start) / calls)
        seconds[name] = [min(repeats)]
    return seconds


# --- the table ---------------------------------------------------------------------------------


def in_child(what: str, chip: str | None, *arguments: str) -> Samples:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DITORCH_")}
    environment["OMP_NUM_THREADS"] = "1"
    if chip is not None:
        environment["DITORCH_CHIP"] = chip
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--measure", what, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
    except subprocess.TimeoutExpired:
        fail(f"{what} on {chip or 'the CPU'} took longer than {DEADLINE_S} s")
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        fail(f"{what} on {chip or 'the CPU'} failed: {last}")
    samples: Samples = json.loads(done.stdout)
    return samples


def row(name: str, unit: str, ours: float, peer: float, peer_name: str, bar: Any) -> dict[str, Any]:
    return {
        "name": name,
        "unit": unit,
        "ours": ours,
        "peer": peer,
        "peer_name": peer_name,
        "ratio": ours / peer,
        "bar": bar,
        "better": "lower",
    }


def tool_rows(chip: str, rounds: int) -> list[dict[str, Any]]:
    on = None if chip == "cpu" else chip
    samples = in_child("steps", on, "--rounds", str(rounds))
    milliseconds = {name: 1e3 * median(seconds) for name, seconds in samples.items()}
    bare = milliseconds.pop("bare")
    return [
        row(f"step on {chip}: {name}", "ms", ours, bare, "bare step", None)
        for name, ours in milliseconds.items()
    ]


def operator_rows(rounds: int, progress: Callable[[], None]) -> list[dict[str, Any]]:
    """Plain torch is measured twice over: its ratio to itself is the noise."""
    kinds = {"plain": "operators", "again": "operators", "ditorch": "operators-with-ditorch"}
    samples: dict[str, Samples] = {kind: defaultdict(list) for kind in kinds}
    for _ in range(rounds):
        for kind, what in kinds.items():
            for name, seconds in in_child(what, None).items():
                samples[kind][name] += seconds
            progress()
    rows, ratios = [], []
    for name in samples["plain"]:
        plain, again, ours = (1e9 * median(samples[kind][name]) for kind in kinds)
        rows.append(row(f"{name} after import ditorch", "ns", ours, plain, "plain torch", None))
        rows.append(row(f"{name}, plain torch again", "ns", again, plain, "plain torch", None))
        ratios.append(ours / plain)
    rows.append(
        row(
            "operator after import ditorch, median",
            "x",
            median(ratios),
            1.0,
            "plain torch",
            NOISE_BAR,
        )
    )
    return rows


def show(evidence: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"cost of the precision tools ({evidence['machine']})")
    for heading in ("what", "unit", "with", "without", "ratio", "bar"):
        table.add_column(heading, justify="left" if heading in ("what", "unit") else "right")
    for each in evidence["rows"]:
        bar = "" if each["bar"] is None else f"{each['bar']:.2f}"
        with_it, without = f"{each['ours']:.2f}", f"{each['peer']:.2f}"
        table.add_row(each["name"], each["unit"], with_it, without, f"{each['ratio']:.2f}", bar)
    Console().print(table)


def fail(sentence: str) -> Any:
    print(f"precision-bench: {sentence}", file=sys.stderr)
    raise typer.Exit(2)


@app.command(
    epilog="Examples:  tools/precision-bench  |  tools/precision-bench --chip b --rounds 40 --json"
)
def main(
    chip: Annotated[
        list[str], typer.Option(help="A chip file or preset, or cpu; may be given again.")
    ] = ["cpu", "b"],  # noqa: B006  (typer's way to have a default list)
    rounds: Annotated[int, typer.Option(min=1, help="Steps measured with each tool.")] = 15,
    operator_rounds: Annotated[
        int, typer.Option(min=0, help="Processes measured with and without ditorch; 0: none.")
    ] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print evidence for machines.")] = False,
    measure: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """What each precision tool costs against the bare run, and what `import ditorch` costs.

    A step is a whole training step of a small Llama, with the tool open; a fast emulated chip shows
    the tool rather than the chip. A ratio of 1 is free.
    """
    if measure:
        kinds: dict[str, Callable[[], Samples]] = {
            "steps": lambda: measure_steps(rounds),
            "operators": lambda: measure_operators(with_ditorch=False),
            "operators-with-ditorch": lambda: measure_operators(with_ditorch=True),
        }
        print(json.dumps(kinds[measure]()))
        return
    from rich.console import Console

    from hyperhetero.progress import Progress

    rows: list[dict[str, Any]] = []
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring", total=3 * operator_rounds + len(chip))
        if operator_rounds:
            rows += operator_rows(operator_rounds, lambda: bar.advance(task))
        for each in chip:
            rows += tool_rows(each, rounds)
            bar.advance(task)
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    evidence = {"tool": "precision-bench", "machine": machine, "rows": rows}
    print(json.dumps(evidence, indent=1)) if as_json else show(evidence)


if __name__ == "__main__":
    app()
