"""What happened to a run: its starts, changes of an elastic job, warnings."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from heteropp.api.training.starts import START, STARTS
from heteropp.board.lines import LineTail
from heteropp.description.files import read_json
from heteropp.runtime.measuring.events import EVENTS


class RunEvents:
    """The events of a run's folder, oldest first."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def files(self) -> list[Path]:
        """The files that they are read from."""
        return [
            *sorted(self.path.glob(f"{STARTS}/[0-9]*/{START}"), key=lambda f: f.parent.name),
            *sorted(self.path.glob("generations/*/change.json")),
            self.path / EVENTS,
        ]

    def read(self) -> list[dict[str, Any]]:
        """Lists {"at", "step", "kind", "text"} by time, where known. Raises FileError."""
        *files, events = self.files()
        starts = [file for file in files if file.name == START]
        found = [_start(file, again=number > 0) for number, file in enumerate(starts)]
        found += [event for file in files if file.name != START and (event := _change(file))]
        found += LineTail(events).new()
        return sorted(found, key=lambda event: event.get("at") or 0)


def _start(file: Path, again: bool) -> dict[str, Any]:
    start = read_json(file, dict[str, Any])
    text = f"{'started again' if again else 'started'} on {start.get('host', 'a host')}"
    return {"at": _seconds(start.get("at")), "kind": "start", "text": text}


def _seconds(time_of_day: Any) -> float | None:
    """Seconds since 1970, of what start.json says."""
    try:
        return datetime.strptime(time_of_day, "%Y-%m-%d %H:%M:%S %z").timestamp()
    except (TypeError, ValueError):
        return None


def _change(file: Path) -> dict[str, Any] | None:
    """A change of an elastic run's plan; None where it is the first."""
    change = read_json(file, dict[str, Any])
    if change.get("start") == "initial":
        return None
    downtime_s, again = change.get("downtime_s", 0), change.get("steps_again")
    text = f"{change.get('cause')}; {downtime_s:.2f} s without a step"
    text += f", {again} steps trained again" if again else ""
    text += f"; the plan is now {change.get('plan')}"
    at = change.get("at")
    return {
        "at": at - downtime_s if at else None,  # when it began
        "step": change.get("step"),
        "kind": "switch" if change.get("start") == "switch" else "recovery",
        "text": text,
    }
