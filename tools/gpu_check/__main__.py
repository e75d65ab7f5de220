"""Says what this Python lacks, in one sentence; else it is the command."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def lacking() -> list[str]:
    """The packages that HyperHetero depends on and that are not here."""
    dependencies = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    names = [re.split(r"[<>=]", dependency)[0] for dependency in dependencies]
    return [name for name in names if importlib.util.find_spec(name.replace("-", "_")) is None]


if missing := lacking():
    print(
        f"gpu-check: {sys.executable} lacks {', '.join(missing)}; expected the packages that "
        f"{PROJECT.name} depends on",
        file=sys.stderr,
    )
    sys.exit(2)

from gpu_check.command import app  # noqa: E402 (it needs them)

app()
