"""Figures by step in bounded memory: of many steps, the least and the largest of each few.

Rows are kept one by one until there are MOST_ROWS, then two by two, then four by four and so on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy

MOST_ROWS = 16_384
RECENT = 2048  # steps that are also kept as they are


class StepTable:
    """Figures by name and step; the steps ascend."""

    def __init__(self, most_rows: int = MOST_ROWS) -> None:
        self.most_rows = most_rows
        self.added = 0  # steps in all
        self.per_row = 1  # steps that share a row
        self.newest: Mapping[str, float | None] = {}
        self._columns: dict[str, int] = {}
        self._steps = numpy.zeros((most_rows, 2), numpy.int64)  # a row's first and last
        self._least = numpy.full((most_rows, 0), numpy.nan)
        self._largest = numpy.full((most_rows, 0), numpy.nan)
        self._rows = 0
        self._in_last_row = 0  # steps
        self._recent: deque[tuple[int, Mapping[str, float | None]]] = deque(maxlen=RECENT)

    def add(self, step: int, figures: Mapping[str, float | None]) -> None:
        """figures: by name; None or absent where there is none."""
        self.newest = figures
        self._recent.append((step, figures))
        self.added += 1
        if self._rows == 0 or self._in_last_row == self.per_row:
            self._begin_row(step)
        row = self._rows - 1
        self._steps[row, 1] = step
        self._in_last_row += 1
        for name, value in figures.items():
            if value is None or not math.isfinite(value):
                continue
            column = self._column(name)
            least, largest = self._least[row, column], self._largest[row, column]
            if not least <= value:  # also where there is none yet
                self._least[row, column] = value
            if not largest >= value:
                self._largest[row, column] = value

    def _begin_row(self, step: int) -> None:
        if self._rows == self.most_rows:
            self._halve()
        self._steps[self._rows, 0] = step
        self._least[self._rows] = self._largest[self._rows] = numpy.nan
        self._rows, self._in_last_row = self._rows + 1, 0

    def _halve(self) -> None:
        steps, least, largest = _joined(self._steps, self._least, self._largest, 2)
        self._rows = len(steps)
        self._steps[: self._rows], self.per_row = steps, 2 * self.per_row
        self._least[: self._rows], self._largest[: self._rows] = least, largest

    def _column(self, name: str) -> int:
        if name not in self._columns:
            self._columns[name] = len(self._columns)
            empty = numpy.full((self.most_rows, 1), numpy.nan)
            self._least = numpy.concatenate([self._least, empty], axis=1)
            self._largest = numpy.concatenate([self._largest, empty], axis=1)
        return self._columns[name]

    def whole(self, most_points: int) -> dict[str, Any]:
        """Returns at most so many points of each figure over all steps, ready for JSON.

        {"steps": [...], "figures": {name: [...]}}. Where steps share a row, they give two points:
        its least and its largest.
        """
        rows = self._rows
        each = 1 if self.per_row == 1 and rows <= most_points else 2  # points
        together = max(1, -(-each * rows // most_points))
        steps, least, largest = self._steps[:rows], self._least[:rows], self._largest[:rows]
        if together > 1:
            steps, least, largest = _joined(steps, least, largest, together)
        if together * self.per_row == 1:
            return _as_json(steps[:, 0], least, self._columns)
        pairs = numpy.stack([least, largest], axis=1)
        falls = numpy.arange(len(pairs)) % 2 == 1  # so that a line between rows does not zigzag
        pairs[falls] = pairs[falls, ::-1]
        alone = steps[:, 0] == steps[:, 1]
        kept = numpy.ones((len(steps), 2), bool)
        kept[alone, 1] = False
        return _as_json(steps[kept], pairs[kept], self._columns)

    def since(self, added: int) -> dict[str, Any] | None:
        """Returns the steps after the first `added` ones; None where they are no longer kept."""
        missing = self.added - added
        if missing < 0 or missing > len(self._recent):
            return None
        rows = list(self._recent)[len(self._recent) - missing :]
        names = sorted({name for _, figures in rows for name in figures})
        return {
            "steps": [step for step, _ in rows],
            "figures": {
                name: [_number(figures.get(name)) for _, figures in rows] for name in names
            },
        }


def _joined(steps: Any, least: Any, largest: Any, together: int) -> tuple[Any, Any, Any]:
    """Every so many rows as one."""
    starts = numpy.arange(0, len(steps), together)
    ends = numpy.minimum(starts + together, len(steps)) - 1
    return (
        numpy.stack([steps[starts, 0], steps[ends, 1]], axis=1),
        numpy.fmin.reduceat(least, starts, axis=0),
        numpy.fmax.reduceat(largest, starts, axis=0),
    )


def _as_json(steps: Any, values: Any, columns: Mapping[str, int]) -> dict[str, Any]:
    return {
        "steps": steps.tolist(),
        "figures": {
            name: [None if value != value else value for value in values[:, column].tolist()]
            for name, column in columns.items()
        },
    }


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
