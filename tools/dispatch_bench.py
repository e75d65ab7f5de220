"""What it costs to launch small operators on an emulated chip, beside the CPU's own.

Two chips: one whose work takes no time, so that what is left is dispatch, launch brackets and
allocation, and one of the user's choice, whose further time is its pacing and its numerics. Chip
and CPU are measured in turn, in one process for each chip, on one thread.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from evidence import Row, row, show
from small_llama import training_step
from twins import CHIP

from dicomm.bench.quiet import Quiet, Watch, worst
from hyperhetero.cli import CommandLine

app = CommandLine()
TIMELESS = "a chip whose work takes no time"
BAR = 1.5  # times the CPU's
CALLS = 100  # in one measurement
DEADLINE_S = 600

Samples = dict[str, dict[str, list[float]]]  # operator -> device -> seconds of a call


def operators(device: str) -> dict[str, Callable[[], Any]]:
    import torch

    torch.manual_seed(0)
    x, y = torch.randn(8, 8, device=device), torch.randn(8, 8, device=device)
    return {
        "empty": lambda: torch.empty(8, 8, device=device),
        "view": lambda: x.view(64),
        "add": lambda: x + y,
        "add_": lambda: x.add_(1e-9),
        "cat": lambda: torch.cat([x, y]),
        "mm": lambda: x @ y,
        "softmax": lambda: x.softmax(-1),
        "sum().item()": lambda: x.sum().item(),
    }


def measure(rounds: int) -> dict[str, Any]:
    """Times every operator and a training step, in turn on the CPU and on this process's chip.

    DITORCH_CHIP names the chip, so each chip takes a process of its own. The result is JSON: the
    seconds of each call ("samples"), and how quiet the machine was ("quiet").
    """
    import torch

    import ditorch

    torch.set_num_threads(1)
    devices = {"cpu": "cpu", "chip": str(ditorch.device)}
    calls = {device: operators(name) for device, name in devices.items()}
    steps = {
        device: training_step(torch.device(name), dim=64, length=32)
        for device, name in devices.items()
    }
    samples: Samples = {}
    watch = Watch()

    def take(name: str, device: str, call: Callable[[], Any], count: int) -> None:
        start = time.perf_counter()
        for _ in range(count):
            call()
        seconds = (time.perf_counter() - start) / count
        torch.accelerator.synchronize()  # what the chip still has to do is not the next one's
        samples.setdefault(name, {}).setdefault(device, []).append(seconds)

    for turn in range(rounds + 1):
        if turn == 1:
            samples.clear()  # the first turn warms up
        for name in calls["cpu"]:
            for device in devices:
                take(name, device, calls[device][name], CALLS)
        for device in devices:
            take("training step", device, steps[device], 1)
        watch.spin()
    return {"samples": samples, "quiet": asdict(watch.result())}


def timeless_chip(folder: Path, neutral: bool = True) -> Path:
    """Writes the file of a chip; one that is not neutral has kernels of its own, not the host's."""
    path = folder / "timeless.toml"
    path.write_text(
        CHIP.format(
            vendor="T",
            launch_s=1e-12,
            efficiency=1.0,
            flops=1e18,
            capacity_bytes=2**30,
            bandwidth_bytes_per_s=1e18,
            intra_node_bytes_per_s=1e18,
            latency_s=1e-12,
            nic_bytes_per_s=1e18,
            host_bytes_per_s=1e18,
            nic_latency_s=1e-12,
            neutral=str(neutral).lower(),
        )
    )
    return path


def in_child(chip: str, rounds: int) -> tuple[Samples, Quiet]:
    environment = os.environ | {"DITORCH_CHIP": chip, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, "--measure", "--rounds", str(rounds)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        print(f"dispatch-bench: chip {chip}: {last}", file=sys.stderr)
        raise typer.Exit(2)
    measured = json.loads(done.stdout)
    return measured["samples"], Quiet(**measured["quiet"])


def rows_of(chip: str, samples: Samples, bar: float | None) -> list[Row]:
    rows = []
    for name, by_device in samples.items():
        ours, peer = (1e6 * median(by_device[device]) for device in ("chip", "cpu"))
        low, _, high = (1e6 * q for q in quantiles(by_device["chip"], n=4))
        rows.append(
            row(
                f"{name} on {chip} (half within {low:.3g} to {high:.3g})",
                "us",
                ours,
                peer=peer,
                peer_name="the same on the CPU",
                bar=None if bar is None else bar * peer,
            )
        )
    return rows


@app.command(epilog="Examples:  tools/dispatch-bench  |  tools/dispatch-bench --chip a --json")
def main(
    chip: Annotated[
        str, typer.Option(help="A preset or chip file, to show with its pacing.")
    ] = "b",
    rounds: Annotated[int, typer.Option(min=4, help="Turns of all operators.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print evidence for machines.")] = False,
    measure_here: Annotated[bool, typer.Option("--measure", hidden=True)] = False,
) -> None:
    """What it costs to launch small operators on an emulated chip, beside the CPU's own."""
    if measure_here:
        print(json.dumps(measure(rounds)))
        return
    with TemporaryDirectory() as folder:
        timeless, quiet = in_child(str(timeless_chip(Path(folder))), rounds)
    paced, quiet_too = in_child(chip, rounds)
    rows = rows_of(TIMELESS, timeless, BAR) + rows_of(f"chip {chip}", paced, None)
    notes = [
        f"the bar is {BAR} times the CPU's time; what chip {chip} takes beyond the first chip is "
        "its pacing and its numerics",
        f"medians of {rounds} turns of {CALLS} calls",
    ]
    show("dispatch-bench", rows, notes, as_json, worst([quiet, quiet_too]))


if __name__ == "__main__":
    app()
