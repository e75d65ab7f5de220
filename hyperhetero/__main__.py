"""`python -m hyperhetero doctor`: what this machine has and lacks for HyperHetero."""

from __future__ import annotations

import json as json_
from dataclasses import asdict
from typing import Annotated

import typer

from hyperhetero.cli import CommandLine, wide_console

LACKING = 1

app = CommandLine(no_args_is_help=True, help="What concerns HyperHetero as a whole.")


@app.callback()
def whole() -> None:
    """What concerns HyperHetero as a whole."""


@app.command(
    epilog="Exit codes: 0 nothing that is required is missing, 1 something is, 2 bad input."
)
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Says what this machine has and lacks, and what each lack costs; it changes nothing."""
    from hyperhetero.doctor.findings import table
    from hyperhetero.doctor.look import look

    findings = look()
    missing = [finding.name for finding in findings if finding.state == "missing"]
    if json:
        rows = [asdict(finding) for finding in findings]
        print(json_.dumps({"ready": not missing, "findings": rows}, indent=2))
    else:
        console = wide_console()
        console.print(table(findings))
        lacks = sum(finding.state == "absent" for finding in findings)
        console.print(
            f"Required and missing: {', '.join(missing)}."
            if missing
            else f"Everything that is required is here; {lacks} optional things are not."
        )
    if missing:
        raise typer.Exit(LACKING)


if __name__ == "__main__":
    app(prog_name="python -m hyperhetero")
