"""tools/quickstart keeps the last run where its arguments are wrong, or a new run begins."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).parents[1] / "tools" / "quickstart"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout that is set up, whose search finds a plan at once, and that has a run."""
    (tmp_path / "tools").mkdir()
    shutil.copy(QUICKSTART, tmp_path / "tools")
    train = f'exec {sys.executable} -m heteropp.cli.train "$@"'
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name, script in (
        ("tools/setup", "true"),
        (".venv/bin/heteropp-search", "true"),
        (".venv/bin/heteropp-train", train),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    run = tmp_path / "runs" / "quickstart"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("the last run's\n")
    return tmp_path


def quickstart(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "tools/quickstart", *arguments],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(QUICKSTART.parents[1])},
    )


def test_a_mistyped_option_leaves_the_last_run_where_it_is(checkout: Path) -> None:
    done = quickstart(checkout, "--resum")
    assert done.returncode == 2 and done.stderr.startswith("No such option: --resum")
    assert done.stderr.count("\n") == 1
    assert (checkout / "runs/quickstart/metrics.jsonl").read_text() == "the last run's\n"
    assert os.listdir(checkout / "runs") == ["quickstart"]


def test_the_last_run_is_moved_before_another_begins(checkout: Path) -> None:
    kept = checkout / "runs" / "quickstart-before" / "metrics.jsonl"
    for _ in range(2):  # the second time there is no run that would take its place
        done = quickstart(checkout, "--steps", "many")
        assert done.returncode == 2 and "'--steps'" in done.stderr
        assert kept.read_text() == "the last run's\n"
