"""The papers' tables, published and ours side by side, with the assumptions behind ours.

Ours are predictions of the event simulator; nothing is trained here. Choose papers, or take all:
h2, metis, autohet, hetu, zorse.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated

import typer
from evidence import Row, show

from hyperhetero.cli import CommandLine
from hyperhetero.progress import Status

PAPERS = ("h2", "metis", "autohet", "hetu", "zorse")

app = CommandLine()


@app.command(help=__doc__)
def main(
    papers: Annotated[list[str] | None, typer.Argument(help=", ".join(PAPERS))] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the evidence as JSON.")] = False,
) -> None:
    chosen = papers or list(PAPERS)
    unknown = [paper for paper in chosen if paper not in PAPERS]
    if unknown:
        print(f"there is no paper {unknown[0]!r}; expected {', '.join(PAPERS)}", file=sys.stderr)
        raise typer.Exit(2)
    rows: list[Row] = []
    notes: list[str] = []
    with Status("") as status:
        for paper in chosen:
            status.update(f"planning and simulating: {paper}")
            found, assumptions = import_module(f"paper_tables.{paper}").table()
            rows += found
            notes += [f"{paper}: {sentence}" for sentence in assumptions]
    show("paper-tables", rows, notes, json)


if __name__ == "__main__":
    app()
