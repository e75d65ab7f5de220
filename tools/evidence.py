"""The rows that a measuring tool prints: a table, or, with --json, the project's one shape."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Set
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dicomm.bench.evidence import Row, is_met, row
from dicomm.bench.judging import is_judged
from dicomm.bench.quiet import Quiet

__all__ = ["Row", "is_met", "result", "row", "show"]

# the units of times, and of ratios and shares of them, which a busy machine changes
TIMED = frozenset({"ns", "us", "ms", "s", "s/step", "x", "%", "points", "tokens/s"})
FILE_COLUMNS = 150  # what is no terminal has no width of its own


def show(
    tool: str,
    rows: list[Row],
    notes: list[str],
    as_json: bool,
    quiet: Quiet | None = None,
    timed: Set[str] = TIMED,
) -> None:
    """Prints the evidence; notes are assumptions and what a reader must know.

    quiet: how quiet the machine was, where times were measured. Rows in the units of `timed` are
    not judged where it was not.
    """
    if quiet:
        notes = [*notes, quiet.sentence]
        rows = [_judged(each, quiet, timed) for each in rows]
    found = result(tool, rows, notes)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=FILE_COLUMNS)
    table = Table(title=tool)
    table.add_column("what")
    for heading in ("ours", "spread", "peer", "ratio", "asked"):
        table.add_column(heading, justify="right")
    table.add_column("peer is")
    for each in rows:
        table.add_row(
            escape(each["name"]),
            _figure(each["ours"], each["unit"]),
            _spread(each),
            _figure(each["peer"], each["unit"]),
            _figure(each["ratio"], "x"),
            _asked(each),
            escape(each["peer_name"] or ""),
        )
    console.print(table)
    for each in rows:
        if not is_judged(each):
            notes = [*notes, f"not judged: {each['name']}: {each['not_judged']}"]
    for note in notes:
        console.print(f"- {note}", soft_wrap=True, markup=False)
    console.print(f"machine: {found['machine']}")


def result(tool: str, rows: list[Row], notes: list[str]) -> dict[str, Any]:
    """The evidence in the one shape."""
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return {"tool": tool, "machine": machine, "rows": rows, "notes": notes}


def _judged(each: Row, quiet: Quiet, timed: Set[str]) -> Row:
    if quiet.is_quiet or each["bar"] is None or each["unit"] not in timed or not is_judged(each):
        return each
    return {**each, "not_judged": "the machine was not quiet"}


def _asked(each: Row) -> str:
    if each["bar"] is None:
        return ""
    limit = "<=" if each["better"] == "lower" else ">="
    verdict = "met" if is_met(each) else "[red]missed[/]"
    return f"{limit} {each['bar']:g} {verdict if is_judged(each) else 'not judged'}"


def _spread(each: Row) -> str:
    ends = each.get("spread")
    return f"{ends[0]:,.4g} .. {ends[1]:,.4g}" if ends else ""


def _figure(value: float | None, unit: str) -> str:
    return "" if value is None else f"{value:,.4g} {unit}".rstrip()
