"""The `dicomm` command: one module a subcommand, a thin face of the library each."""

from __future__ import annotations

from dicomm.cli.topo import EXAMPLES, topo
from hyperhetero.cli import CommandLine

app = CommandLine(no_args_is_help=True)
app.command("topo", epilog=EXAMPLES)(topo)


@app.callback()
def dicomm() -> None:
    """Messages between chips of different vendors."""


def main() -> None:
    app()
