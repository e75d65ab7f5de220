"""The precision reports of ditorch-align that lie in a run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic_core import from_json

MOST_BYTES = 64 << 20


def reports(folder: Path) -> dict[Path, dict[str, Any]]:
    """Returns the verdicts by file; report.json lies in the folder or one below it."""
    found: dict[Path, dict[str, Any]] = {}
    for file in sorted([*folder.glob("report.json"), *folder.glob("*/report.json")]):
        if file.stat().st_size > MOST_BYTES:
            continue
        try:
            content = from_json(file.read_bytes())
            chips = [
                {"chip": chip["chip"], "passed": chip["passed"], "verdict": chip["verdict"]}
                for chip in content["chips"]
            ]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # of something else
        found[file] = {"file": str(file.relative_to(folder)), "chips": chips}
    return found
