"""ditorch-align: shows that a chip computes what a reference computes, or where it does not.

It stands outside the package ditorch because importing that opens this machine's chip, which help
does not need, and which `run` and `isolate` leave to processes of their own, one for each chip.
"""

from __future__ import annotations

import json as json_
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from hyperhetero.cli import BAD_INPUT, CommandLine, output_file, output_folder
from hyperhetero.input import LONGEST_WAIT_S
from hyperhetero.output import LOCK, held, target_of
from hyperhetero.progress import Progress, Status

if TYPE_CHECKING:
    from rich.progress import TaskID

    from ditorch.conform.results import Conformance
    from ditorch.precision.results import Findings

FAILED = 1

app = CommandLine(
    no_args_is_help=True,
    help="Shows that a chip computes what a reference computes, or where it does not.",
    epilog="Exit codes: 0 what was checked passed, 1 it failed, 2 bad input.",
)

Script = Annotated[Path, typer.Argument(help="A training script.")]
Args = Annotated[list[str] | None, typer.Argument(help="Its arguments, after --.")]
Standards = Annotated[Path | None, typer.Option(help="A team's own standards (TOML).")]
Html = Annotated[Path | None, output_file(help="Write a page, too.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Output = Annotated[Path, output_folder("--output", "-o", help="The folder for all results.")]
Deadline = Annotated[
    float, typer.Option(min=1, max=LONGEST_WAIT_S, help="Seconds for one run of the script.")
]


@contextmanager
def one_sentence() -> Iterator[None]:
    """Bad input ends the command with its sentence on standard error and exit code 2."""
    try:
        yield
    except (ValueError, ImportError, OSError) as error:
        print(f"ditorch-align: {error}", file=sys.stderr)
        raise typer.Exit(BAD_INPUT) from None


def prepare(*, chip: bool) -> None:
    """Settles what `import ditorch` does in this process.

    It opens this machine's chip only for commands that use it here, and no tools: what ditorch.toml
    and the environment say of tools is meant for training scripts, and would write their files.
    """
    if "ditorch" in sys.modules:
        return
    os.environ.pop("DITORCH_PRECISION", None)
    os.environ["DITORCH_CONFIG"] = os.devnull
    if not chip:
        os.environ.pop("DITORCH_CHIP", None)
        os.environ["DITORCH_VENDOR"] = "cpu"


def examples(*lines: str) -> str:
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


# --- run ---------------------------------------------------------------------------------------


@app.command(
    epilog=examples(
        "ditorch-align run",
        "ditorch-align run train.py --chips npu --reference cuda --steps 50",
        "ditorch-align run train.py --chips b,d --tools compare,capture -- --batch 4",
        "DITORCH_VENDOR_LIBRARY=$PWD/libacme.so ditorch-align run --chips library",
    )
)
def run(
    script: Annotated[
        Path | None, typer.Argument(help="A training script; a small Llama if not given.")
    ] = None,
    args: Args = None,
    chips: Annotated[
        str,
        typer.Option(
            help="Emulated chips (presets or files) or vendors; library: DITORCH_VENDOR_LIBRARY's."
        ),
    ] = "a,b,c,d",
    reference: Annotated[str, typer.Option(help="A chip or vendor that is right.")] = "cpu",
    steps: Annotated[int, typer.Option(min=1, help="Steps whose losses are compared.")] = 300,
    tools: Annotated[
        str, typer.Option(help="What looks at operators: compare, overflow, time, capture; or ''.")
    ] = "compare,overflow,time",
    tool_steps: Annotated[
        int, typer.Option(min=1, help="Steps of a further run, in which the tools look on.")
    ] = 2,
    standards: Standards = None,
    output: Output = Path("runs/align"),
    deadline: Deadline = 3600.0,
    json: Json = False,
) -> None:
    """Runs a script on each chip and on the reference: losses, operators, and the report.

    Each run is a process of its own; the script is not touched.
    """
    with one_sentence():
        prepare(chip=False)
        with Status("starting"):
            from ditorch.align.gather import gather
            from ditorch.align.page import write_report
            from ditorch.align.run import EXAMPLE, folder_of, run_and_align
            from ditorch.align.tables import alignment_evidence, show_alignments, show_report

        names = _split(chips)
        with _alone(output), _bar() as bar:
            tasks: dict[str, TaskID] = {}

            def progress(name: str, taken: int) -> None:
                if name not in tasks:
                    total = tool_steps if name.endswith("tools") else steps
                    tasks[name] = bar.add_task(name, total=total)
                bar.update(tasks[name], completed=taken)

            alignments = run_and_align(
                script or EXAMPLE,
                args or [] if script else ["--steps", str(steps)],
                chips=names,
                reference=reference,
                steps=steps,
                tools=_split(tools),
                tool_steps=tool_steps,
                output=output,
                standards=standards,
                deadline_s=deadline,
                progress=progress,
            )
        found = gather(*(folder_of(chip, output) for chip in names))
        written = write_report(found, output / "report.html")
    if json:
        print(json_.dumps(alignment_evidence(alignments), indent=2))
    else:
        console = Console(highlight=False)
        show_alignments(console, alignments, reference)
        show_report(console, found)
        console.print(f"written to {written}", soft_wrap=True, markup=False)
    if not found.passed:
        raise typer.Exit(FAILED)


# --- compare ----------------------------------------------------------------------------------


@app.command(
    epilog=examples(
        "ditorch-align compare captures/gpu captures/npu",
        "ditorch-align compare captures/gpu captures/npu --standards ours.toml --html page.html",
        "ditorch-align compare gpu/metrics.jsonl npu/metrics.jsonl",
    )
)
def compare(
    reference: Annotated[Path, typer.Argument(help="The right one: a capture, or losses.")],
    other: Annotated[Path, typer.Argument(help="The one to judge.")],
    standards: Standards = None,
    html: Html = None,
    json: Json = False,
) -> None:
    """Compares two captures, or the losses of two runs, taken on different machines.

    Losses are findings of `run`, or a metrics.jsonl of heteropp-train.
    """
    with one_sentence():
        prepare(chip=False)
        with Status("comparing"):
            from ditorch.align.offline import compare_offline

            found = compare_offline(reference, other, standards)
        _finish(found, html, json)


# --- isolate ----------------------------------------------------------------------------------


@app.command(
    epilog=examples(
        "ditorch-align isolate train.py --chip d-mini",
        "ditorch-align isolate train.py --chip npu --reference-losses gpu/metrics.jsonl -- --lr 1",
    )
)
def isolate(
    script: Script,
    args: Args = None,
    chip: Annotated[str, typer.Option(help="An emulated chip or a vendor.")] = ...,  # type: ignore
    reference: Annotated[str, typer.Option(help="A chip or vendor that is right.")] = "cpu",
    reference_losses: Annotated[
        Path | None, typer.Option(help="The right losses, instead of running the reference.")
    ] = None,
    max_runs: Annotated[int, typer.Option(min=1, help="Runs of the script, at most.")] = 100,
    output: Output = Path("isolate"),
    deadline: Deadline = 600.0,
    html: Html = None,
    json: Json = False,
) -> None:
    """Finds the operators that make a chip's losses depart, from the losses alone.

    Runs the script again and again, each time with other operators computed by the host.
    """
    with one_sentence():
        prepare(chip=False)
        with Status("starting") as status:
            from ditorch.align.run import check_chip
            from ditorch.precision.isolation.isolate import isolate as search
            from ditorch.precision.isolation.runs import RunError
            from ditorch.precision.loss import read_losses

            check_chip(chip)
            check_chip(reference)
            losses = read_losses(reference_losses) if reference_losses else None
            try:
                with _alone(output):
                    found = search(
                        script,
                        args or [],
                        chip=chip,
                        output=output,
                        reference=reference,
                        reference_losses=losses,
                        max_runs=max_runs,
                        deadline_s=deadline,
                        progress=lambda line: status.update(escape(line.strip())),
                    )
            except RunError as error:
                raise ValueError(str(error)) from None
        _finish(found, html, json)


# --- replay -----------------------------------------------------------------------------------


@app.command(
    epilog=examples(
        "DITORCH_CHIP=b ditorch-align replay captures/gpu",
        "ditorch-align replay captures/gpu --operators '*softmax*,mm' --steps 0:2 --json",
    )
)
def replay(
    capture: Annotated[Path, typer.Argument(help='Taken with tensors = "all".')],
    operators: Annotated[str, typer.Option(help="Names or patterns; all if empty.")] = "",
    modules: Annotated[str, typer.Option(help="Patterns of module names.")] = "",
    steps: Annotated[str, typer.Option(help="Such as 0:10; all if empty.")] = "",
    standards: Standards = None,
    html: Html = None,
    json: Json = False,
) -> None:
    """Runs captured operators again on this machine's chip, and judges what they give.

    The chip's error is judged by the standards, and by its ratio to the captured chip's own error.
    """
    with one_sentence():
        prepare(chip=True)
        with Status("replaying"):
            from ditorch.precision.captures.replay import replay as replay_capture
            from ditorch.precision.standards import load_standards

            chosen = {"operators": operators, "modules": modules, "steps": steps}
            selection = {name: pattern for name, pattern in chosen.items() if pattern}
            rules = load_standards(standards)
            found = replay_capture(capture, standards=rules, **selection)  # type: ignore[arg-type]
        _finish(found, html, json)


# --- report -----------------------------------------------------------------------------------


@app.command(
    epilog=examples(
        "ditorch-align report runs/precision",
        "ditorch-align report runs/precision --html page.html",
        "ditorch-align report runs/precision --json > report.json",
    )
)
def report(
    directory: Annotated[Path, typer.Argument(help="Where tools wrote findings, at any depth.")],
    html: Annotated[
        Path | None, output_file(help="The page; DIRECTORY/report.html if not given.")
    ] = None,
    json: Json = False,
) -> None:
    """Gathers all findings under a directory into one page, and report.json beside it."""
    prepare(chip=False)
    with one_sentence(), Status("gathering findings"):
        # torch, which findings need, is seconds of import
        from ditorch.align.gather import gather
        from ditorch.align.page import write_report
        from ditorch.align.tables import show_report

        found = gather(directory)
        written = write_report(found, html or directory / "report.html")
    if json:
        print(found.model_dump_json(indent=1))
    else:
        console = Console(highlight=False)
        show_report(console, found)
        console.print(f"written to {written}", soft_wrap=True, markup=False)
    if not found.passed:
        raise typer.Exit(FAILED)


# --- conform ----------------------------------------------------------------------------------


@app.command(
    epilog=examples(
        "DITORCH_CHIP=b ditorch-align conform",
        "ditorch-align conform --operators 'linalg.*' --dtypes float32,bfloat16",
        "ditorch-align conform --only runtime --output out/runtime.json",
        "ditorch-align conform --samples 1 --within 60",
    )
)
def conform(
    output: Annotated[Path, output_file(help="The result, in JSON.")] = Path(
        "runs/conformance.json"
    ),
    markdown: Annotated[Path | None, output_file(help="The result as a page, too.")] = None,
    only: Annotated[str, typer.Option(help="Parts: runtime, operators.")] = "",
    operators: Annotated[str, typer.Option(help="Names or patterns, such as 'linalg.*'.")] = "",
    dtypes: Annotated[str, typer.Option(help="Such as float32,bfloat16; all if empty.")] = "",
    samples: Annotated[int, typer.Option(min=1, help="Inputs of each operator and dtype.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    deadline: Annotated[
        float, typer.Option(min=1, max=LONGEST_WAIT_S, help="Seconds for one operator.")
    ] = 60.0,
    within: Annotated[
        float | None,
        typer.Option(
            min=1,
            max=LONGEST_WAIT_S,
            help="Begin no operator after so many seconds; --seed decides which are left out.",
        ),
    ] = None,
    preload: Annotated[
        str, typer.Option("--import", help="Modules to import first, such as kernels in Python.")
    ] = "",
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a run stopped.")] = False,
    json: Json = False,
    min_pass_rate: Annotated[
        float, typer.Option(min=0, max=1, help="Of supported samples, for exit code 0.")
    ] = 0.99,
) -> None:
    """Runs the device's runtime checks and PyTorch's operator database against the CPU.

    Lists are separated by commas. Exit code 1 if a runtime check or too many samples failed.
    """
    with one_sentence():
        prepare(chip=True)
        with Status("starting"):
            from ditorch.conform.suite import run_conformance
            from ditorch.conform.table import print_table, write_markdown

        output.parent.mkdir(parents=True, exist_ok=True)
        lock = target_of(output).with_name(f".{output.name}.lock")
        with held(lock, str(output)), _bar() as bar:
            task = bar.add_task("starting", total=None)
            conformance = run_conformance(
                output=output,
                only=set(_split(only)) or None,
                operators=_split(operators),
                dtypes=_split(dtypes),
                samples_per_dtype=samples,
                seed=seed,
                workers=workers,
                deadline_s=deadline,
                within_s=within or math.inf,
                preload=_split(preload),
                resume=resume,
                progress=lambda done, total, name: bar.update(
                    task, completed=done, total=total, description=name
                ),
            )
        if markdown:
            write_markdown(conformance, markdown)
    if json:
        print(output.read_text(), end="")
    else:
        print_table(conformance)
        print(f"written: {output}" + (f", {markdown}" if markdown else ""))
    if not _conforms(conformance, min_pass_rate):
        raise typer.Exit(FAILED)


def _conforms(conformance: Conformance, min_pass_rate: float) -> bool:
    """A suite that could try nothing has shown nothing."""
    checks, samples = conformance.check_tally, conformance.tally
    tried = checks.passed + checks.failed + samples.supported
    return tried > 0 and checks.failed == 0 and conformance.pass_rate >= min_pass_rate


# --- what the commands share --------------------------------------------------------------------


@contextmanager
def _alone(output: Path) -> Iterator[None]:
    """No other run writes to the folder in the meantime. Raises LockError."""
    output.mkdir(parents=True, exist_ok=True)
    with held(output / LOCK, str(output)):
        yield


def _finish(found: Findings, page: Path | None, json: bool) -> None:
    """Shows one tool's findings and ends the command with their exit code."""
    from ditorch.align.page import write_report
    from ditorch.align.report import make_report
    from ditorch.align.tables import show_report

    written = write_report(make_report([found]), page) if page else ""
    if json:
        print(found.model_dump_json(indent=1))
    else:
        console = Console(highlight=False)
        show_report(console, make_report([found]))
        if written:
            console.print(f"written to {written}", soft_wrap=True, markup=False)
    if not found.passed:
        raise typer.Exit(FAILED)


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=Console(stderr=True),
    )  # fmt: skip


def _split(listed: str) -> list[str]:
    return [item.strip() for item in listed.split(",") if item.strip()]


def main() -> None:
    app(prog_name="ditorch-align")


if __name__ == "__main__":
    main()
