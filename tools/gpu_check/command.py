"""Whether HyperHetero runs well on this machine's NVIDIA GPU, in less than ten minutes.

It builds, computes as the CPU does, trains to the CPU's losses, sends messages, trains together
with the CPU and an emulated chip, and predicts its steps. A step that fails is a row with its
cause, and the others go on; the rows are written to docs/gpu.json.
"""

from __future__ import annotations

import json as json_
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from evidence import Row, is_met, result, row, show

from gpu_check.part import Found, Part, rehearsing_part
from gpu_check.processes import StepError
from gpu_check.step import STEPS, Step, perform
from hyperhetero.cli import BAD_INPUT, CommandLine
from hyperhetero.progress import Status

EVIDENCE = Path(__file__).resolve().parents[2] / "docs" / "gpu.json"

app = CommandLine()


class NoGpu(Exception):
    """One sentence."""


@app.command(
    help=__doc__, epilog="Examples:  tools/gpu-check  |  tools/gpu-check --rehearse --only builds"
)
def main(
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse", help="Let an emulated chip take the GPU's part, and write nothing."
        ),
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Steps to take, repeatable: {', '.join(step.name for step in STEPS)}; "
            "then nothing is written."
        ),
    ] = None,
    chip: Annotated[
        Path | None,
        typer.Option(help="The GPU's chip file, where none is shipped for its product."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Keep here what the steps write: plans, profiles, what they say."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the evidence as JSON.")] = False,
) -> None:
    try:
        steps = _chosen(only)
        gpu = "" if rehearse else _gpu(chip)
    except (NoGpu, ValueError) as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        raise typer.Exit(BAD_INPUT) from None
    with _folder(output) as folder:
        part = rehearsing_part(folder) if rehearse else Part(gpu)
        rows, notes, failed = _take(steps, part, folder)
    show("gpu-check", rows, notes, json)
    if not rehearse and not only:
        _write(rows, notes)
    if failed or any(each["bar"] is not None and not is_met(each) for each in rows):
        raise typer.Exit(1)


@contextmanager
def _folder(output: Path | None) -> Iterator[Path]:
    """The folder that the steps write to; it is removed where none was named."""
    if output is not None:
        try:
            output.mkdir(parents=True)
        except OSError as error:
            print(
                f"gpu-check: --output is {output}, which cannot be made ({error.strerror}); "
                "expected a new folder",
                file=sys.stderr,
            )
            raise typer.Exit(BAD_INPUT) from None
        yield output.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        yield Path(folder)


def _write(rows: list[Row], notes: list[str]) -> None:
    from heteropp.description.files import FileError, write_text

    try:
        write_text(EVIDENCE, json_.dumps(result("gpu-check", rows, notes), indent=2) + "\n")
    except FileError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        raise typer.Exit(BAD_INPUT) from None


def _chosen(only: list[str] | None) -> list[Step]:
    """Raises ValueError."""
    known = [step.name for step in STEPS]
    for name in only or ():
        if name not in known:
            raise ValueError(f"--only is {name}; expected one of {', '.join(known)}")
    return [step for step in STEPS if not only or step.name in only]


def _gpu(chip: Path | None) -> str:
    """Returns the name or path of the GPU's chip file. Raises NoGpu or ValueError."""
    import torch

    from heteropp.inventory.product_names import chip_of

    if torch.version.cuda is None:
        raise NoGpu("there is no NVIDIA GPU that torch can use: this build of it has no CUDA")
    if not torch.cuda.is_available():
        raise NoGpu("there is no NVIDIA GPU that torch can use: torch.cuda finds none")
    product = torch.cuda.get_device_name()
    if chip is not None:
        from heteropp.description.chips import load_chip

        return str(load_chip(str(chip)).path.resolve())
    if (name := chip_of(product)) is None:
        raise ValueError(f"no chip file is shipped for {product!r}; give one by --chip")
    return name


def _take(steps: list[Step], part: Part, folder: Path) -> tuple[list[Row], list[str], bool]:
    """Takes one step after another; returns rows, notes, and whether a step failed."""
    rows: list[Row] = []
    notes = ["a rehearsal: an emulated chip takes the GPU's part"] if part.is_rehearsed else []
    failed = False
    for number, step in enumerate(steps, 1):
        with Status(f"{number} of {len(steps)}: {step.name}"):
            try:
                found = perform(step, part, folder)
            except StepError as error:
                found = Found([row(f"{step.name} failed", "", None, peer_name=str(error))], [])
                failed = True
        rows += found.rows
        notes += found.notes
    if part.is_rehearsed:
        rows = [{**each, "name": f"rehearsal: {each['name']}"} for each in rows]
    return rows, notes, failed
