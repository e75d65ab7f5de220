"""`python -m ditorch`: which vendors' chips are here; `python -m ditorch run`: a script on one."""

from __future__ import annotations

import json
import os
import runpy
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import ditorch
from ditorch.vendors import VENDORS, look_at
from hyperhetero.cli import CommandLine

app = CommandLine()
_ready: list[str] = []  # the script to run


@dataclass(frozen=True)
class Row:
    """One vendor, in the order of the search."""

    vendor: str
    maker: str
    state: str
    why: str
    chosen: bool
    quirks: list[str]


@app.callback(invoke_without_command=True)
def show(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Shows every vendor ditorch knows, what was found, and the device that "device" means.

    The vendor is chosen by DITORCH_VENDOR, else it is the first found in the table's order. Exits
    with code 2 if what was asked for is not there.

    Examples:

      python -m ditorch

      DITORCH_CHIP=b-mini python -m ditorch --json

      DITORCH_CHIP=b-mini python -m ditorch run --cuda-compat train.py --steps 10
    """
    if context.invoked_subcommand is not None:
        return
    error = _start()
    chosen = None
    if not error:
        try:
            chosen = _chosen()
        except RuntimeError as failure:
            error = f"{ditorch.vendor()} does not describe its chip: {failure}".splitlines()[0]
    report = {
        "error": error,
        "vendors": [asdict(row) for row in _rows(error)],
        "chosen": chosen,
        "torch": torch.__version__,
    }
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    if error:
        raise typer.Exit(2)


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def run(
    script: Annotated[Path, typer.Argument(help="A Python file.", dir_okay=False)],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    cuda_compat: Annotated[
        bool, typer.Option(help='"cuda" and torch.cuda mean the device, whatever it is.')
    ] = False,
) -> None:
    """Runs an unmodified script, and the Python processes it starts, with ditorch imported.

    Example:

      DITORCH_CHIP=b-mini python -m ditorch run --cuda-compat train.py --steps 10
    """
    if not script.is_file():
        _fail(f"there is no script {str(script)!r}")
    os.environ["DITORCH_AUTOLOAD"] = "1"
    if cuda_compat:
        os.environ["DITORCH_CUDA_COMPAT"] = "1"
    if error := _start(with_tools=True):
        _fail(error)
    sys.argv = [str(script), *(arguments or [])]
    sys.path.insert(0, str(script.resolve().parent))
    _ready.append(str(script))


def _start(with_tools: bool = False) -> str | None:
    """Starts ditorch; the sentence that says why it did not."""
    try:
        ditorch.start()
        if with_tools:
            ditorch._open_configured_tools()
    except ImportError as error:
        return str(error)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def _fail(message: str) -> None:
    print(f"ditorch: {message}", file=sys.stderr)
    raise typer.Exit(2)


def _rows(error: str | None) -> list[Row]:
    """Looks at the vendors the search did not reach, too."""
    chosen = None if error else ditorch._choice.vendor
    return [
        Row(
            vendor.name,
            vendor.maker,
            (look := look_at(vendor)).state,
            look.why,
            vendor is chosen,
            vendor.quirks.sentences(),
        )
        for vendor in VENDORS
    ]


def _chosen() -> dict[str, Any]:
    chip = ditorch.chip()
    return {
        "vendor": ditorch.vendor(),
        "because": ditorch._choice.because,
        "device": str(ditorch.device),
        "chip_vendor": chip.vendor,
        "chip_type": chip.chip_type,
        "memory_bytes": chip.memory_bytes,
        "emulated": ditorch.is_emulated(),
    }


def _print(report: dict[str, Any]) -> None:
    console = Console()
    table = Table(title='vendors, in the order in which "device" is looked for')
    for column in ("", "vendor", "state", "why"):
        table.add_column(column, overflow="fold")
    styles = {"found": "green", "broken": "bold red", "not found": "dim"}
    for row in report["vendors"]:
        state = f"[{styles[row['state']]}]{row['state']}[/]"
        lacks = "".join(f"\n- {quirk}" for quirk in row["quirks"])
        table.add_row(
            "*" if row["chosen"] else "",
            f"{row['vendor']} ({row['maker']})",
            state,
            escape(row["why"] + lacks),
        )
    console.print(table)
    if report["error"]:
        print(f"ditorch: {report['error']}", file=sys.stderr)
        return
    chosen = report["chosen"]
    emulated = ", emulated" if chosen["emulated"] else ""
    total_bytes = chosen["memory_bytes"]
    memory = f"{total_bytes / 2**30:.1f} GiB" if total_bytes else "memory unknown"
    console.print(f"chosen: {chosen['vendor']}, because {chosen['because']}", markup=False)
    console.print(
        f'"device" is {chosen["device"]}: chip {chosen["chip_type"]} of {chosen["chip_vendor"]}, '
        f"{memory}{emulated}; torch {report['torch']}",
        markup=False,
    )


def main() -> None:
    """The script runs out here, so that the command line handles none of its exceptions."""
    try:
        app()
    except SystemExit as end:
        if end.code or not _ready:
            raise
    runpy.run_path(_ready[0], run_name="__main__")


if __name__ == "__main__":
    main()
