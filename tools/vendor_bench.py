"""What a vendor's library costs: OpenCL's products and training step, and emuchip's ABI.

OpenCL: products of float32 matrices in the way that the library chose by its own measurements
(kept in its cache, as for everybody), beside CLBlast on the same device, as it comes and tuned;
the share of a Llama's training step in which a kernel ran, by torch's profiler; the host's time for
each small operator. emuchip, on a chip whose work takes no time: the same host time, and the same
library with the table of operators cut off before `map`, as the ABI's first version had it, so that
elementwise operators go to the host's kernels. Everybody has a process of its own; in every round
each is measured once, in turn. CLBlast is tuned at each size by its best sets of parameters for
PoCL.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from dispatch_bench import timeless_chip
from evidence import TIMED, Row, row, show
from rich.console import Console
from vendors.chip import LAYERS, Chip
from vendors.clblast import CANDIDATES, Clblast
from vendors.contestants import Contestant, Failed

from dicomm.bench.judging import FEWEST, row_over_rounds
from dicomm.bench.quiet import Quiet, Watch, worst
from hyperhetero.cli import CommandLine
from hyperhetero.progress import Progress

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ROOT / "ditorch" / "lib"
WRAPPED = ROOT / "tests" / "ditorch" / "vendors_in_c" / "wrapped.c"
SIDES = [256, 512, 1024]
LENGTH = 128  # tokens of a sequence
LAUNCHES = 64  # the width of a model whose step is launches for the most part
OPENCL = {
    "DITORCH_VENDOR": "opencl",
    "DITORCH_VENDOR_LIBRARY": "",
    "KINETO_LOG_LEVEL": "99",  # the profiler's library is silent
}
LEAST_SHARE = 80.0  # per cent of a step
FLOPS_OF_SAMPLE = 2**30  # a product of few is repeated
FIRST_ABI = "ABI 1, without map"
CLBLAST, TUNED = "CLBlast untuned", "CLBlast tuned"

app = CommandLine()
Times = dict[str, float]  # seconds by operator
Found = dict[str, list[Any]]  # what each measurement gave, by round


def in_turns(what: str, calls: dict[str, Any], rounds: int) -> tuple[Found, Quiet]:
    """Measures each once a round; every round begins with the one after the last one's first."""
    found: Found = {name: [] for name in calls}
    names = list(calls)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=(rounds + 1) * len(names))
        watch = Watch()
        for turn in range(rounds + 1):  # the first warms up
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                result = calls[name]()
                if turn > 0:
                    found[name].append(result)
                    watch.spin()
                progress.advance(task)
        return found, watch.result()


# --- OpenCL -----------------------------------------------------------------------------------


def products(
    opencl: Contestant, sides: list[int], candidates: int, rounds: int
) -> tuple[list[Row], Quiet, list[str]]:
    """Rows of products beside CLBlast's, how quiet it was, and notes."""
    notes, rows, calls = [], [], {}
    with ExitStack() as open_ones:
        for side in sides:
            repeated = max(1, FLOPS_OF_SAMPLE // (2 * side**3))
            calls[f"ours {side}"] = partial(opencl.ask, "product_s", side, repeated)
            for name in (CLBLAST, TUNED):
                peer = open_ones.enter_context(
                    Contestant(f"{name} at {side}", partial(Clblast, side), {})
                )
                if name == TUNED:
                    notes.append(f"{name} at {side}: {peer.ask('tune', candidates)}")
                elif not peer.ask("is_right"):
                    raise Failed(f"{name} multiplies wrongly at {side}")
                calls[f"{name} {side}"] = partial(peer.ask, "seconds", repeated)
        found, quiet = in_turns("products", calls, rounds)
    for side in sides:
        speeds = {
            name: [2e-9 * side**3 / seconds for seconds in found[f"{name} {side}"]]
            for name in ("ours", CLBLAST, TUNED)
        }
        for name in (CLBLAST, TUNED):
            peer_speed = statistics.median(speeds[name])
            rows.append(
                row_over_rounds(
                    f"OpenCL: product of {side} x {side} beside {name}",
                    "GFLOP/s",
                    speeds["ours"],
                    peer=peer_speed,
                    peer_name=name,
                    bar=peer_speed,
                    better="higher",
                )
            )
    return rows, quiet, notes


def chosen_ways() -> str:
    """What the library's cache says of products of float32 matrices, which the rows are of."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    lines = []
    for file in (base / "hyperhetero" / "opencl").glob("matmul-*.txt"):
        text = file.read_text()[16:]  # behind the digest
        lines += [line for line in text.splitlines() if line.startswith("f32 rrr ")]
    return "ways chosen for float32 matrices, by class of rows, columns and depth: " + (
        "; ".join(line.removeprefix("f32 rrr ") for line in lines) or "none"
    )


def step(opencl: Contestant, dim: int, rounds: int) -> tuple[list[Row], Quiet]:
    calls = {
        "plain": partial(opencl.ask, "step_s", dim, LENGTH),
        "profiled": partial(opencl.ask, "step_shares", dim, LENGTH),
    }
    found, quiet = in_turns("training steps", calls, rounds)
    # the profiler waits for every kernel, so that this share is the least that a step has
    shares = [100 * kernels_s / step_s for step_s, kernels_s in found["profiled"]]
    model = f"{LAYERS} layers of width {dim}"
    return [
        row_over_rounds(
            f"OpenCL: share of a profiled step in which a kernel ran, {model}",
            "%",
            shares,
            bar=LEAST_SHARE,
            better="higher",
        ),
        row_over_rounds(
            f"OpenCL: training step, {model}",
            "ms",
            [1e3 * seconds for seconds in found["plain"]],
            peer=1e3 * statistics.median(step_s for step_s, _ in found["profiled"]),
            peer_name="the same under the profiler",
        ),
    ], quiet


# --- host time of operators, and emuchip's ABI --------------------------------------------------


def cut_library(folder: Path, version: int) -> dict[str, str]:
    """The environment of emuchip with the operators of that version of the ABI. Raises Failed."""
    library = folder / f"libemuchip{version}.so"
    length = {1: "offsetof(ditorch_operators,map)", 2: "sizeof(ditorch_operators)"}[version]
    command = [
        "cc", "-std=gnu11", "-shared", "-fPIC", f"-I{ROOT / 'csrc' / 'ditorch' / 'abi'}",
        f'-DINNER="{LIBRARIES / "libemuchip.so"}"', "-DRUNTIME_BYTES=sizeof(ditorch_runtime)",
        f"-DOPERATORS_BYTES={length}", "-DVERSION_MORE=0", "-o", str(library), str(WRAPPED), "-ldl",
    ]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise Failed(f"the library of ABI {version} is not compiled: {error}") from None
    chip = timeless_chip(folder, neutral=False)
    return {
        "DITORCH_VENDOR": "",
        "DITORCH_VENDOR_LIBRARY": str(library),
        "EMUCHIP_CHIP": str(chip),
        "OMP_NUM_THREADS": "1",
    }


def operators(opencl: Contestant | None, rounds: int) -> tuple[list[Row], Quiet]:
    """Rows of the host's time for each operator, and of emuchip's second ABI beside its first."""
    with TemporaryDirectory() as folder, ExitStack() as open_ones:
        chips = {
            version: open_ones.enter_context(
                Contestant(f"ABI {version}", Chip, cut_library(Path(folder), version))
            )
            for version in (1, 2)
        }
        calls = {f"ABI {v}": partial(chip.ask, "operators_s") for v, chip in chips.items()}
        for version, chip in chips.items():
            calls[f"whole, ABI {version}"] = partial(chip.ask, "whole_s", LAUNCHES, LENGTH)
        if opencl:
            calls["OpenCL"] = partial(opencl.ask, "operators_s")
        found, quiet = in_turns("operators", calls, rounds)
        on_host = {v: chip.ask("calls_on_host", LAUNCHES, LENGTH) for v, chip in chips.items()}
    rows = [
        row(
            "emuchip: operators of a training step that the host computes",
            "calls",
            on_host[2],
            peer=on_host[1],
            peer_name=FIRST_ABI,
        ),
        *_rows_of("host time of an operator", "emuchip", found["ABI 2"], found["ABI 1"]),
        *_rows_of("time until done", "emuchip", found["whole, ABI 2"], found["whole, ABI 1"]),
    ]
    if opencl:
        rows = [*_rows_of("host time of an operator", "OpenCL", found["OpenCL"]), *rows]
    return [*rows, _together(found)], quiet


def _rows_of(
    what: str, vendor: str, ours: list[Times], peers: list[Times] | None = None
) -> Iterator[Row]:
    """A row for each operator; peers: the same by the first ABI, than which none may be slower."""
    for name in ours[0]:
        peer = peers and 1e6 * statistics.median(each[name] for each in peers)
        yield row_over_rounds(
            f"{vendor}: {what}: {name}",
            "us",
            [1e6 * each[name] for each in ours],
            peer=peer,
            peer_name=FIRST_ABI if peers else None,
            bar=peer,
        )


def _together(found: Found) -> Row:
    """All of emuchip's rows in one: in each round, the geometric mean of the ABIs' ratios."""
    ratios = [
        statistics.geometric_mean(
            second[name] / first[name]
            for kind in ("", "whole, ")
            for first, second in [(found[f"{kind}ABI 1"][turn], found[f"{kind}ABI 2"][turn])]
            for name in first
        )
        for turn in range(len(found["ABI 1"]))
    ]
    return row_over_rounds("emuchip: ABI 2 over ABI 1, all of these together", "x", ratios, bar=1.0)


@app.command(epilog="Examples:  tools/vendor-bench  |  tools/vendor-bench --side 512 --json")
def main(
    side: Annotated[
        list[int] | None, typer.Option(min=16, help="Rows of the square matrices; repeatable.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=FEWEST, help="Turns of all.")] = 15,
    candidates: Annotated[
        int, typer.Option(min=1, max=len(CANDIDATES), help="Sets that CLBlast is tuned by.")
    ] = len(CANDIDATES),
    dim: Annotated[int, typer.Option(min=16, help="Width of the model that OpenCL trains.")] = 512,
    as_json: Annotated[bool, typer.Option("--json", help="Print evidence for machines.")] = False,
) -> None:
    """What OpenCL's products, steps and operators take, and what emuchip's second ABI does."""
    rows: list[Row] = []
    quiets: list[Quiet] = []
    notes = [" ".join((__doc__ or "").split())]
    try:
        with ExitStack() as open_ones:
            opencl = None
            if (LIBRARIES / "libditorch_opencl.so").exists():
                opencl = open_ones.enter_context(Contestant("OpenCL", Chip, OPENCL))
                found, quiet, about = products(opencl, side or SIDES, candidates, rounds)
                rows, quiets, notes = found, [quiet], [*notes, *about, chosen_ways()]
                found, quiet = step(opencl, dim, rounds)
                rows, quiets = rows + found, [*quiets, quiet]
            else:
                notes.append("OpenCL is left out: it was not there when ditorch was built")
            found, quiet = operators(opencl, rounds)
            rows, quiets = rows + found, [*quiets, quiet]
    except Failed as failure:
        print(f"vendor-bench: {failure}", file=sys.stderr)
        raise typer.Exit(1) from None
    show("vendor-bench", rows, notes, as_json, worst(quiets), TIMED | {"GFLOP/s"})


if __name__ == "__main__":
    app()
