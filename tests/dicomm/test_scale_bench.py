"""tools/scale-bench: a small job's figures."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

TOOL = Path(__file__).parents[2] / "tools" / "scale-bench"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([TOOL, *arguments], capture_output=True, text=True, timeout=120)


def test_groups_cost_a_rank_nothing_but_their_requests() -> None:
    done = run("--ranks", "4", "--groups", "3", "--json")
    assert done.returncode == 0, done.stderr
    evidence: dict[str, Any] = json.loads(done.stdout)
    assert evidence["tool"] == "scale-bench"
    rows = {row["name"]: row for row in evidence["rows"]}
    for transport in ("shm", "tcp"):
        for what, bar in (("threads", 0), ("descriptors", 60)):
            row = rows[f"4 ranks, {transport}: {what} that 3 groups add"]
            assert (row["ours"], row["bar"]) == (0, bar)
        assert rows[f"4 ranks, {transport}: requests of the store, a group"]["ours"] == 1
        # the main thread and the one that moves bytes; a connection with each of the other ranks
        assert rows[f"4 ranks, {transport}, all connected: threads"]["ours"] == 2
        assert rows[f"4 ranks, {transport}, all connected: descriptors"]["ours"] >= 3 + 3
        assert rows[f"4 ranks, {transport}: barrier after all are connected"]["ours"] > 0


def test_a_job_of_one_rank_is_refused_in_one_sentence() -> None:
    done = run("--ranks", "1")
    assert done.returncode == 2 and "Traceback" not in done.stderr
