"""Fallback, cast, overflow and time: on an emulated chip, and between ranks."""

from __future__ import annotations

from pathlib import Path

import forks
from on_chip import DEADLINE_S, environment, run_checks


def test_tools() -> None:
    run_checks("b-mini", "check_precision_tools.py")


def test_overflows_between_ranks(tmp_path: Path) -> None:
    script = Path(__file__).with_name("precision_ranks.py")
    ranks = [
        forks.start([str(script), str(tmp_path)], environment(None, RANK=str(rank)))
        for rank in range(2)
    ]
    try:
        outputs = ["".join(rank.communicate(DEADLINE_S)) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
