"""What the commands print: tables for a terminal."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ditorch.align.report import ChipReport, Report
from ditorch.align.run import Alignment
from ditorch.precision.loss import BAR, PUBLISHED

_MOST_FAILED = 10


def show_alignments(console: Console, alignments: Sequence[Alignment], reference: str) -> None:
    """The H2 paper's table 1 again."""
    table = Table(
        title=f"losses against {reference}: mean relative error (H2, equation 1)",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    for heading in ("chip", "here", "H2, table 1", "has to be below", "verdict"):
        right = heading in ("here", "H2, table 1", "has to be below")
        table.add_column(heading, justify="right" if right else "left")
    for each in alignments:
        error, published = each.mean_relative_error, _published(each.chip)
        table.add_row(
            Text(each.chip),
            "none" if error is None else f"{100 * error:.4g}%",
            "" if published is None else f"{published:.3%}",
            f"{BAR:.1%}",
            _verdict(each.passed),
        )
    console.print(table)


def alignment_evidence(alignments: Sequence[Alignment]) -> dict[str, Any]:
    """The rows of `show_alignments` in the shape that all tools of evidence print."""
    rows = []
    for each in alignments:
        error, published = each.mean_relative_error, _published(each.chip)
        if error is not None and not math.isfinite(error):
            error = None  # JSON has no NaN
        rows.append(
            {
                "name": f"mean relative error of the losses, chip {each.chip}",
                "unit": "%",
                "ours": None if error is None else 100 * error,
                "peer": None if published is None else 100 * published,
                "peer_name": "H2, table 1",
                "ratio": None if error is None or published is None else error / published,
                "bar": 100 * BAR,
                "better": "lower",
            }
        )
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return {"tool": "ditorch-align run", "machine": machine, "rows": rows}


def _published(chip: str) -> float | None:
    """The presets are the paper's chips, and their small twins."""
    return PUBLISHED.get(chip.removesuffix("-mini"))


def show_report(console: Console, report: Report) -> None:
    """Each chip's verdict, its first bad operator, and what failed."""
    for chip in report.chips:
        line = Text.assemble(_verdict(chip.passed), "  ", (chip.chip, "bold"), f": {chip.verdict}")
        console.print(line, soft_wrap=True)
        _show_first_bad(console, chip)
        _show_failed(console, chip)


def _show_first_bad(console: Console, chip: ChipReport) -> None:
    if chip.first_bad is None:
        return
    where = chip.first_bad.where
    lines = (
        f"  first bad operator: {where.operator} (call {where.index})",
        f"    module {where.module or 'none'}, source {where.source or 'unknown'}",
        f"    {where.phase} of step {where.step}, rank {where.rank}: {chip.first_bad.reason}",
    )
    console.print("\n".join(lines), soft_wrap=True, markup=False)


def _show_failed(console: Console, chip: ChipReport) -> None:
    failed = [row for row in chip.operators if not row.passed]
    for row in failed[:_MOST_FAILED]:
        console.print(
            f"  {row.operator} {row.tensor} {row.dtype}: {row.failed_calls} of {row.calls} calls "
            f"failed: {row.reason}",
            soft_wrap=True,
            markup=False,
        )
    if (more := len(failed) - _MOST_FAILED) > 0:
        console.print(f"  and {more} more", markup=False)


def _verdict(passed: bool) -> Text:
    return Text("passed", "green") if passed else Text("failed", "red")
