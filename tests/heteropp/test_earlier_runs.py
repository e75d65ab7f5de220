"""Plans, checkpoints and snapshots of earlier commits are read, and train on as they would have."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from earlier_runs import EARLIER, ELASTIC, PLANS, SETTINGS, STEPS
from elastic_run import changes_of, whole_lines
from sampled import sampled
from training_run import start, wait, write_text

TOLERANCE = 1e-12  # float64; the machine that made them may have summed in another order
EVERY_DAY = ("1f1b-zero-1",)


def goes_on(name: str, folder: Path, steps: int, *arguments: str) -> None:
    """Resumes a copy of the run, up to a step, and holds its losses to the uninterrupted ones."""
    shutil.copytree(EARLIER / name, folder, dirs_exist_ok=True)
    write_text(folder / "text")
    process = start(folder, "--resume", *SETTINGS, "--steps", str(steps), *arguments)
    code, _, stderr = wait(process, 150)
    assert code == 0, stderr
    metrics = whole_lines(folder / "run" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, steps + 1))
    expected = json.loads((folder / "losses.json").read_text())[:steps]
    assert [line["loss"] for line in metrics] == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize(
    "name",
    [*EVERY_DAY, *sampled((name for name in PLANS if name not in EVERY_DAY), 6)],
)
def test_a_checkpoint_trains_on(name: str, tmp_path: Path) -> None:
    goes_on(name, tmp_path, STEPS)


@pytest.mark.long
def test_snapshots_of_an_elastic_job_train_on(tmp_path: Path) -> None:
    stopped = whole_lines(EARLIER / ELASTIC / "run" / "metrics.jsonl")[-1]["step"]
    goes_on(ELASTIC, tmp_path, stopped + 3, "--elastic", "--device", "cpu")
    assert changes_of(tmp_path / "run")[-1]["step"] == stopped
