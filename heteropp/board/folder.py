"""The folder of one run, read as the run goes on."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from heteropp.api.training.options import TrainingOptions
from heteropp.api.training.starts import BUCKET, CLUSTER, PLAN, START, STARTS
from heteropp.board.cluster_view import cluster_view
from heteropp.board.events import RunEvents
from heteropp.board.figures import Figures
from heteropp.board.lines import LineTail
from heteropp.board.reports import reports
from heteropp.board.steps import StepTable
from heteropp.board.trace import read_trace
from heteropp.description.files import FileError, read_json
from hyperhetero.output import LOCK

METRICS, TRACE, GENERATIONS = "metrics.jsonl", "trace.json", "generations"
LINES_AT_ONCE = 2000  # of metrics, before the page is served what there is


class RunFolder:
    """What a run left so far: figures by step, and details (plan, cluster, timeline, events)."""

    def __init__(self, path: Path) -> None:
        """Raises FileError where `path` is not the folder of a run."""
        check_run(path)
        self.path, self.name = path, path.resolve().name
        self.problem: str | None = None
        self.table, self.replaced = StepTable(), 0
        self._tail = LineTail(path / METRICS)
        self._events = RunEvents(path)
        self._details: dict[str, Any] = {}
        self._seen: tuple = ()
        self.details_number = 0  # grows when the details change
        self._figures = Figures()

    def read(self, most_lines: int | None = None) -> bool:
        """Reads what is new, of the metrics at most so many lines; returns whether that was all.

        Raises FileError.
        """
        self._read_details()
        lines = self._tail.new()
        for count, line in enumerate(lines):
            if self._tail.times_replaced != self.replaced:
                self.table, self.replaced = StepTable(), self._tail.times_replaced
                self._figures = Figures()
                self._figures.of_plan(self._details.get("plan"))
            step = line.get("step")
            if not isinstance(step, int):
                raise FileError(f'{self._tail.path}: a line has no step; expected {{"step": 1, ...')
            self.table.add(step, self._figures.of(line))
            if most_lines and count + 1 >= most_lines:
                lines.close()  # type: ignore[attr-defined]
                return False
        return True

    @property
    def details(self) -> dict[str, Any]:
        """The plan, the cluster and so on, ready for JSON."""
        return self._details

    @property
    def peaks(self) -> list[int]:
        """The most bytes that each rank's chip held in any step, by rank."""
        return self._figures.peaks.tolist()

    @property
    def is_running(self) -> bool:
        """Whether a process has the folder; one on another host is believed."""
        try:
            holder = json.loads((self.path / LOCK).read_text())
            return holder["host"] != socket.gethostname() or Path(f"/proc/{holder['pid']}").exists()
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _read_details(self) -> None:
        """Reads the small files again when one of them has changed. Raises FileError."""
        start, newest = _newest_start(self.path), _newest_generation(self.path)
        source = newest or start
        files = [start / START if start else None, self.path / TRACE, *self._events.files()]
        files += _plans(source) if source else []
        report_files = list(reports(self.path))
        seen = tuple((file, _changed_at(file)) for file in [*files, *report_files] if file)
        if seen == self._seen:
            return
        plan = next((_plan(file) for file in _plans(source)), None) if source else None
        cluster = None
        if source and (source / CLUSTER).exists():
            cluster = cluster_view(source / CLUSTER, plan.get("members") if plan else None)
        self._figures.of_plan(plan)
        self._details = {
            "start": _start(start / START) if start else None,
            "plan": plan,
            "cluster": cluster,
            "timeline": read_trace(self.path / TRACE, plan),
            "events": self._events.read(),
            "reports": list(reports(self.path).values()),
        }
        self._seen = seen
        self.details_number += 1


def check_run(path: Path) -> None:
    """Raises FileError where `path` is not the folder of a run."""
    if not path.exists():
        raise FileError(f"{path} is not there; expected the folder that heteropp-train wrote")
    if not path.is_dir():
        raise FileError(f"{path} is a file; expected the folder that heteropp-train wrote")
    if not any((path / name).exists() for name in (METRICS, STARTS, TRACE)):
        raise FileError(
            f"{path} is not the folder of a run: it has no {METRICS}, {STARTS}/ or {TRACE}"
        )


def _newest_start(path: Path) -> Path | None:
    folders = (path / STARTS).glob("[0-9]*")
    return max(folders, key=lambda folder: _number(folder.name), default=None)


def _number(name: str) -> int:
    return int(name) if name.isdigit() else -1


def _newest_generation(path: Path) -> Path | None:
    """Returns the newest generation of an elastic run that has trained."""
    return max((file.parent for file in (path / GENERATIONS).glob("*/change.json")), default=None)


def _plans(folder: Path) -> list[Path]:
    return [file for file in (folder / PLAN, folder / BUCKET.format(1)) if file.exists()]


def _plan(file: Path) -> dict[str, Any]:
    """The plan as its file has it: its model may be of a family whose code is not here."""
    found = read_json(file, dict[str, Any])
    if "pipelines" not in found:
        raise FileError(f"{file} is no plan: it has no pipelines")
    return found


def _start(file: Path) -> dict[str, Any]:
    found = read_json(file, dict[str, Any])
    options = found.get("options", {})
    return {
        "at": found.get("at"),
        "command": " ".join(map(str, found.get("command", ()))),
        "host": found.get("host"),
        "steps": options.get("steps", TrainingOptions.steps),
        "versions": found.get("versions", {}),
    }


def _changed_at(file: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def each_named(paths: list[Path]) -> Iterator[RunFolder]:
    """Yields the runs; those of one name get the names of the folders above. Raises FileError."""
    runs = [RunFolder(path) for path in paths]
    for run in runs:
        if [other.name for other in runs].count(run.name) > 1:
            run.name = "/".join(run.path.resolve().parts[-2:])
        yield run
