"""planner-bench on random clusters keeps what it has found, and goes on from there."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "planner-bench"
QUICK = 8007  # the seed of a cluster of two chips


def run(keep: Path, longer_s: float = 1.0) -> subprocess.CompletedProcess[str]:
    options = ["--no-published", "--clusters=1", f"--seed={QUICK}", f"--longer-s={longer_s}"]
    command = [str(TOOL), *options, f"--keep={keep}", "--json"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.long
def test_a_kept_cluster_is_not_searched_again(tmp_path: Path) -> None:
    keep = tmp_path / "a folder" / "kept.jsonl"
    first = run(keep)
    (line,) = keep.read_text().splitlines()
    kept = {**json.loads(line), "step_s": 0.5, "best_s": 0.4}  # which no search finds
    assert (kept["seed"], kept["longer_s"]) == (QUICK, 1.0)
    keep.write_text(json.dumps(kept) + "\n")
    again = run(keep)
    behind = [
        [row["ours"] for row in json.loads(each.stdout)["rows"] if "behind" in row["name"]]
        for each in (first, again)
    ]
    assert behind == [pytest.approx([0, 0], abs=1), pytest.approx([25, 25])]
    assert len(keep.read_text().splitlines()) == 1
    run(keep, 1.5)  # another question
    assert len(keep.read_text().splitlines()) == 2


@pytest.mark.parametrize("content", ["steps: 3\n", '{"seed": 8007, "step_s": "0.5"}\n'])
def test_a_file_of_something_else_is_named(tmp_path: Path, content: str) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(content)
    found = run(other)
    assert found.returncode == 2
    (sentence,) = found.stderr.splitlines()
    assert str(other) in sentence
    assert "--keep" in sentence
    assert other.read_text() == content


def test_a_pipe_keeps_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    found = run(tmp_path / "pipe")
    assert found.returncode == 2
    (sentence,) = found.stderr.splitlines()
    assert "no regular file" in sentence
