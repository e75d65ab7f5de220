"""What the page is told of the runs: all at first, later only what is new."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heteropp.board.folder import LINES_AT_ONCE, RunFolder, each_named
from heteropp.description.files import FileError

POINTS = 2000  # of a figure that the page gets at first: about as many as a chart has pixels
POINTS_OF_FILE = 4000  # of a page that cannot ask again


@dataclass(frozen=True)
class Known:
    """What a page has of a run: its answer to the next question is what is new."""

    steps: int = 0  # that it was told of
    replaced: int = -1  # how often the run's metrics had been written anew
    details: int = 0


class RunBoard:
    """Several runs. Threads may ask at the same time."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises FileError where one of them is not the folder of a run."""
        self.runs = list(each_named(list(paths)))
        self._lock = threading.Lock()

    def whole(self) -> dict[str, Any]:
        """Reads everything, for a page that is a file. Raises FileError."""
        for run in self.runs:
            run.read()
        return {"live": False, "runs": [_news(run, Known(), POINTS_OF_FILE) for run in self.runs]}

    def news(self, known: Sequence[Known]) -> dict[str, Any]:
        """Reads what is new, and returns what a page does not know yet; known: by run."""
        with self._lock:
            is_all = True
            for run in self.runs:
                try:
                    is_all &= run.read(LINES_AT_ONCE)
                    run.problem = None
                except FileError as error:  # the other runs are still shown
                    run.problem = str(error)
            pairs = zip(self.runs, known, strict=True)
            return {
                "live": True,
                "more": not is_all,
                "runs": [_news(run, had, POINTS) for run, had in pairs],
            }


def _news(run: RunFolder, known: Known, points: int) -> dict[str, Any]:
    table = run.table
    added = table.since(known.steps) if known.replaced == run.replaced and known.steps else None
    answer: dict[str, Any] = {
        "name": run.name,
        "path": str(run.path),
        "running": run.is_running,
        "problem": run.problem,
        "known": {
            "steps": table.added,
            "replaced": run.replaced,
            "details": run.details_number,
        },
        "newest": table.newest,
        "peaks": run.peaks if table.added != known.steps else None,
        "added": added,
        "all": table.whole(points) if added is None else None,
    }
    if known.details != run.details_number:
        answer["details"] = run.details
    return answer
