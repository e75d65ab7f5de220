"""The conform command: does this chip do what PyTorch expects of a device?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ditorch.conform.results import Conformance
from ditorch.conform.suite import run_conformance
from ditorch.conform.table import print_table, write_markdown
from hyperhetero_output import held, target_of

_EXAMPLES = """Examples:

  DITORCH_CHIP=b ditorch-align conform

  ditorch-align conform --operators 'linalg.*' --dtypes float32,bfloat16

  ditorch-align conform --only runtime --output out/runtime.json
"""


def conform(
    output: Annotated[Path, typer.Option(help="The result, in JSON.")] = Path(
        "runs/conformance.json"
    ),
    markdown: Annotated[Path | None, typer.Option(help="The result as a page, too.")] = None,
    only: Annotated[str, typer.Option(help="Parts: runtime, operators.")] = "",
    operators: Annotated[str, typer.Option(help="Names or patterns, such as 'linalg.*'.")] = "",
    dtypes: Annotated[str, typer.Option(help="Such as float32,bfloat16; all if empty.")] = "",
    samples: Annotated[int, typer.Option(min=1, help="Inputs of each operator and dtype.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    deadline: Annotated[float, typer.Option(min=1, help="Seconds for one operator.")] = 60.0,
    preload: Annotated[
        str, typer.Option("--import", help="Modules to import first, such as kernels in Python.")
    ] = "",
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a run stopped.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    min_pass_rate: Annotated[
        float, typer.Option(min=0, max=1, help="Of supported samples, for exit code 0.")
    ] = 0.99,
) -> None:
    """Runs the device's runtime and PyTorch's operator database against the CPU.

    Lists separated by commas. Exit code 1 if a runtime check or too many samples failed, 2 for bad
    input.
    """
    try:
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
                preload=_split(preload),
                resume=resume,
                progress=lambda done, total, name: bar.update(
                    task, completed=done, total=total, description=name
                ),
            )
        if markdown:
            write_markdown(conformance, markdown)
    except (ValueError, ImportError, OSError) as error:
        print(f"conform: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if as_json:
        print(output.read_text(), end="")
    else:
        print_table(conformance)
        print(f"written: {output}" + (f", {markdown}" if markdown else ""))
    raise typer.Exit(0 if _is_good(conformance, min_pass_rate) else 1)


conform.__doc__ = f"{conform.__doc__}\n\n{_EXAMPLES}"


def _split(listed: str) -> list[str]:
    return [item.strip() for item in listed.split(",") if item.strip()]


def _is_good(conformance: Conformance, min_pass_rate: float) -> bool:
    """A suite that could try nothing has shown nothing."""
    checks, samples = conformance.check_tally, conformance.tally
    tried = checks.passed + checks.failed + samples.supported
    return tried > 0 and checks.failed == 0 and conformance.pass_rate >= min_pass_rate


def _bar() -> Progress:
    return Progress(
        BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        TextColumn("{task.description}"), console=Console(stderr=True),
    )  # fmt: skip
