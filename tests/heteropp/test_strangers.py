"""tools/strangers-bench: strangers change nothing of what a job computes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "strangers-bench"


@pytest.mark.long
def test_two_thousand_strangers_do_not_change_the_losses_of_six_ranks() -> None:
    command = [str(TOOL), "--json", "--steps", "24", "--count", "2000"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    rows = {row["name"]: row for row in json.loads(ended.stdout)["rows"]}
    assert rows["losses that differ from those of the job alone"]["ours"] == 0
    assert rows["a step with 2000 strangers"]["ours"] > 0  # it went on with them
