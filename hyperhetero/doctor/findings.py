"""What the doctor says of one thing, and the table of all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.table import Table

State = Literal["here", "absent", "missing"]
STYLES: dict[State, str] = {"here": "green", "absent": "yellow", "missing": "bold red"}


@dataclass(frozen=True)
class Finding:
    """One thing that a machine may have."""

    name: str
    state: State  # absent: optional and not here (or too little); missing: required and not here
    found: str
    cost: str = ""  # of the lack; empty where it is here


def required(name: str, here: bool, found: str, cost: str) -> Finding:
    return Finding(name, "here", found) if here else Finding(name, "missing", found, cost)


def optional(name: str, here: bool, found: str, cost: str) -> Finding:
    return Finding(name, "here", found) if here else Finding(name, "absent", found, cost)


def table(findings: list[Finding]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    shown = Table("", "state", "found", "what the lack costs")
    for finding in findings:
        style = STYLES[finding.state]
        cells = (finding.name, f"[{style}]{finding.state}[/]", finding.found, finding.cost)
        shown.add_row(*(cell if i == 1 else escape(cell) for i, cell in enumerate(cells)))
    return shown
