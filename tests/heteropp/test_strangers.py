"""tools/strangers-bench: strangers change nothing of what a job computes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "strangers-bench"


@pytest.mark.timeout(600)
@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [500, 2000])
def test_strangers_do_not_change_the_losses_of_six_ranks(count: int) -> None:
    command = [str(TOOL), "--json", "--steps", "36", "--count", str(count)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert ended.returncode == 0, ended.stderr
    rows = {row["name"]: row for row in json.loads(ended.stdout)["rows"]}
    assert rows["losses that differ from those of the job alone"]["ours"] == 0
    assert rows[f"a step with {count} strangers"]["ours"] > 0  # it went on with them
