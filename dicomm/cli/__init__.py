"""The `dicomm` command: one module a subcommand, a thin face of the library each."""

from __future__ import annotations

import typer

from dicomm.cli.topo import EXAMPLES, topo

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
app.command("topo", epilog=EXAMPLES)(topo)


@app.callback()
def dicomm() -> None:
    """Messages between chips of different vendors."""


def main() -> None:
    app()
