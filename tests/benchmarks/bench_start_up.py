"""How long commands and imports take from a cold process."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

COMMANDS = {
    "import dicomm": ("-c", "import dicomm"),
    "import heteropp": ("-c", "import heteropp"),
    "import ditorch": ("-c", "import ditorch"),
    "heteropp-search --help": ("-m", "heteropp.cli.search", "--help"),
    "heteropp-train --help": ("-m", "heteropp.cli.train", "--help"),
}

pytestmark = pytest.mark.benchmark(group="start-up")


@pytest.mark.parametrize("name", COMMANDS)
def test_start_up(name: str, benchmark: Any) -> None:
    command = [sys.executable, *COMMANDS[name]]
    benchmark.pedantic(
        subprocess.run, (command,), {"check": True, "capture_output": True}, rounds=5
    )
