"""How what is known of all families looks, on a terminal and as a page."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

if TYPE_CHECKING:
    from heteropp.api.families import Degree, Report

HEADINGS = (
    *("family", "layers", "tp 1", "tp 2", "tp 2, sequence parallel"),
    "config beside the default",
)
DEGREES = 3  # of the headings
PAGE = """\
# Families of models

`heteropp-models list --markdown > docs/models.md` makes this page, with transformers {release}.
`heteropp-models check FOLDER` does the same for one model, and `heteropp-train` once before it
trains a family that it has not seen.

Each family is made small, with layers of every kind that it has. One step of it runs in float64, by
transformers unsplit and by us in three stages, each on one rank (tp 1) or on two (tp 2), also with
rows cut over these where weights are not (sequence parallel). The figures are the largest error of
the loss and of all gradients, each relative to its largest element in transformers; up to
{tolerance:.0e} passes. About 1e-7 is float32's rounding, in which many families compute norms and
angles whatever the dtype.
"""


def rows(reports: list[Report]) -> Iterator[tuple[str, ...]]:
    """Yields a row for each family whose layers follow each other."""
    for report in reports:
        if report.is_own:
            rows_are_cut = "yes" if report.is_sequence_parallel else "no"
            yield (report.family, "our own", "yes", "yes", rows_are_cut, "")
        elif not report.problem:
            degrees = [_cell(degree) for degree in report.degrees]
            degrees += ["no"] * (DEGREES - len(degrees))  # where there is no tp 2
            what = "experts" if report.has_experts else "dense"
            yield (report.family, what, *degrees, _changes(report))
        elif report.is_stack:
            yield (report.family, "", f"no: {report.problem}", "no", "no", "")


def others(reports: list[Report]) -> list[str]:
    """Returns the families that are not among the rows."""
    return [each.family for each in reports if each.problem and not each.is_stack]


def table(reports: list[Report]) -> Table:
    """All families on a terminal."""
    found = Table(box=box.SIMPLE_HEAD, caption=_others(reports), caption_justify="left")
    for heading in HEADINGS:
        found.add_column(heading, no_wrap=heading == "family")
    for row in rows(reports):
        found.add_row(*row)
    return found


def markdown(reports: list[Report]) -> str:
    """All families as a page."""
    from heteropp.models.hugging_face.check import TOLERANCE
    from heteropp.models.hugging_face.config import RELEASE

    lines = [
        PAGE.format(release=RELEASE, tolerance=TOLERANCE),
        f"| {' | '.join(HEADINGS)} |",
        "|---" * len(HEADINGS) + "|",
        *(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows(reports)),
    ]
    if text := _others(reports):
        lines += ["", *textwrap.wrap(text, 100, break_on_hyphens=False)]
    return "\n".join(lines)


def _others(reports: list[Report]) -> str:
    names = others(reports)
    if not names:
        return ""
    return (
        "Refused, as their models are no stack of layers between a table and a head, or cannot be "
        f"made of their default config: {', '.join(names)}."
    )


def _cell(degree: Degree) -> str:
    if degree.problem:
        return f"no: {degree.problem.removeprefix(f'tensor-parallel degree {degree.tp}: ')}"
    return f"{degree.error:.0e}"


def _changes(report: Report) -> str:
    """Returns what the config has beside the family's default, lists in short."""
    shown = []
    for key, value in report.changes.items():
        text = value if isinstance(value, str) else json.dumps(value)
        shown.append(key if len(text) > 12 else f"{key} {text}")
    return ", ".join(shown)
