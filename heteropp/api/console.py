"""Consoles, and numbers as a person reads them."""

from __future__ import annotations

from typing import IO

from rich.console import Console

FILE_COLUMNS = 160  # what is no terminal has no width of its own


def output_console(file: IO[str] | None = None) -> Console:
    """Returns a console on standard output or a file, FILE_COLUMNS wide unless it is a terminal.

    It takes brackets for text, not for rich's markup: a cluster's name may be "prod[eu]".
    """
    console = Console(file=file, highlight=False, markup=False)
    if console.is_terminal:
        return console
    return Console(file=file, highlight=False, markup=False, width=FILE_COLUMNS)


def seconds(value: float) -> str:
    """Returns a duration for people: in seconds, or in milliseconds below ten of them."""
    return f"{value:,.2f} s" if value >= 10 else f"{value * 1e3:,.1f} ms"
