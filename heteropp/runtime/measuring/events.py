"""events.jsonl: what happened to a run besides its steps, one JSON object a line."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Literal

from heteropp.description.files import FileError

EVENTS = "events.jsonl"  # in a run's output

EventKind = Literal["straggler", "warning", "restart", "stop"]


def keep_event(output: Path, kind: EventKind, step: int, text: str) -> None:
    """Adds an event, with the time of day in seconds since 1970. Raises FileError.

    step: the newest that was completed.
    """
    line = json.dumps({"at": time.time(), "step": step, "kind": kind, "text": text})
    try:
        with (output / EVENTS).open("a") as file:
            file.write(line + "\n")
    except OSError as error:
        raise FileError(f"{output / EVENTS} cannot be written: {error.strerror}") from None
