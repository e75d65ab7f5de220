"""Fallback, cast, overflow and time: on an emulated chip, and between ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from on_chip import DEADLINE_S, environment, run_checks


def test_tools() -> None:
    run_checks("b-mini", "check_precision_tools.py")


def test_overflows_between_ranks(tmp_path: Path) -> None:
    script = Path(__file__).with_name("precision_ranks.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path)],
            env=environment(None, RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=DEADLINE_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
