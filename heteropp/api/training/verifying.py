"""Reads all of a run's data before it is trained on, with a bar where that takes a while."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

from heteropp.data.integrity import verify
from heteropp.data.source import open_tokens
from hyperhetero.progress import Progress

SILENT_S = 2.0


def verify_data(data: Path | None, validation: Iterable[Path]) -> None:
    """Raises FileError where a token file is not as it was written."""
    verify_shown(data)
    for each in validation:
        verify_shown(each)


def verify_shown(source: Path | None) -> None:
    """Checks a token file, None: the standard one, with a progress bar. Raises FileError."""
    tokens = open_tokens(source)
    console = Console(stderr=True)
    bar = Progress(
        TextColumn(f"checking {tokens.path.name}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task("")
    start_s = time.monotonic()

    def progress(done: int, total: int) -> None:
        if time.monotonic() - start_s > SILENT_S:
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        verify(tokens, progress)
    finally:
        bar.stop()
