"""Cases that ranks run in turns, and what a tool says of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import typer
from evidence import Row, show
from rich.console import Console

from dicomm.bench.quiet import Quiet, Watch, worst
from heteropp.description.files import FileError
from hyperhetero.progress import Progress
from pipelines.ranks import BadInput, Failed, Ranks

Case = tuple[Any, ...]  # what a rank's `step` is given


def take_turns(
    what: str, ranks_of: Mapping[Case, Ranks], steps: int, untimed: int = 1
) -> tuple[dict[Case, list[list[Any]]], Quiet]:
    """What the ranks of a case say of each of its steps, by rank; the untimed steps go first.

    Every turn begins with the case after the one that the last turn began with. Raises Failed.
    """
    cases = list(ranks_of.items())
    found: dict[Case, list[list[Any]]] = {case: [] for case in ranks_of}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=len(found) * (untimed + steps))
        watch = Watch()
        for turn in range(untimed + steps):
            first = turn % len(cases)
            for case, ranks in cases[first:] + cases[:first]:
                answers = ranks.call("step", *case)
                if turn >= untimed:
                    found[case].append(answers)
                    watch.spin()
                progress.advance(task)
        return found, watch.result()


def report(
    tool: str, about: str | None, parts: Iterable[tuple[list[Row], Quiet]], json: bool
) -> None:
    """Shows all rows; one sentence instead, and exit code 2, of bad input, or 1 of a failure."""
    rows: list[Row] = []
    quiets = []
    try:
        for found, quiet in parts:
            rows += found
            quiets.append(quiet)
    except (BadInput, FileError, Failed) as error:
        print(f"{tool}: {error}", file=sys.stderr)
        raise typer.Exit(1 if isinstance(error, Failed) else 2) from None
    show(tool, rows, [" ".join((about or "").split())], json, worst(quiets))
