"""What was found, in the shape that every measuring tool of the project prints with --json."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from dicomm.bench.quiet import LOUD, Quiet
from dicomm.bench.timing import Timing

Row = dict[str, Any]


def row(
    name: str,
    unit: str,
    ours: float | None,
    *,
    peer: float | None = None,
    peer_name: str | None = None,
    bar: float | None = None,
    better: str = "lower",
) -> Row:
    """bar: the figure asked of `ours`."""
    ratio = ours / peer if ours is not None and peer else None
    return {
        "name": name,
        "unit": unit,
        "ours": _rounded(ours),
        "peer": _rounded(peer),
        "peer_name": peer_name,
        "ratio": _rounded(ratio),
        "bar": bar,
        "better": better,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def evidence(
    command: str, rows: list[Row], quiet: Quiet | None, missing: Mapping[str, str]
) -> dict[str, Any]:
    """rows, then who is missing, then how quiet the machine was."""
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    absent = [
        row(f"missing: {name}", "", None, peer_name=f"{name}: {why}")
        for name, why in missing.items()
    ]
    if quiet:
        machine += f"; {quiet.sentence}"
        absent += [
            row("machine: CPU taken by others", "%", quiet.others_percent),
            row("machine: a fixed piece of work, median over best", "x", quiet.spin_median),
            row("machine: a fixed piece of work, worst over best", "x", quiet.spin_worst),
        ]
    return {"tool": f"dicomm-bench {command}", "machine": machine, "rows": rows + absent}


def cell(timing: Timing | None) -> str:
    """Formats a cell of a table of times in us: the median, and the 99th percentile in brackets."""
    if timing is None:
        return "-"
    tail = "" if timing.p99_us is None else f" [dim]({_short(timing.p99_us)})[/]"
    return _short(timing.p50_us) + tail


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def is_met(each: Row) -> bool:
    ours, bar = each["ours"], each["bar"]
    return ours is not None and (ours <= bar if each["better"] == "lower" else ours >= bar)


def show_bars(console: Console, result: dict[str, Any]) -> None:
    """The rows that something is asked of; on a machine that was not quiet they are not judged."""
    asked = [each for each in result["rows"] if each["bar"] is not None]
    if not asked:
        return
    table = Table(title="what is asked")
    for heading in ("what", "found", "asked", ""):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for each in asked:
        ours = "-" if each["ours"] is None else f"{each['ours']:.2f} {each['unit']}"
        limit = "at most" if each["better"] == "lower" else "at least"
        verdict = "[green]met[/]" if is_met(each) else "[red]missed[/]"
        if LOUD in result["machine"]:
            verdict = "not judged"
        table.add_row(each["name"], ours, f"{limit} {each['bar']:g}", verdict)
    console.print(table)


def show_machine(console: Console, result: dict[str, Any], emulated: bool = False) -> None:
    """emulated: the figures are by an emulated clock, which others do not disturb."""
    for each in result["rows"]:
        if each["name"].startswith("missing: "):
            console.print(f"not there: {each['peer_name']}", highlight=False)
    console.print(f"machine: {result['machine']}", highlight=False)
    if LOUD in result["machine"] and not emulated:
        console.print("[red]Do not quote these figures: others used the machine meanwhile.[/]")
