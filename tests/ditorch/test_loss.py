"""Losses recorded from outside a script, and the paper's table 1 from them."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import forks
import pytest
from on_chip import ROOT, environment

from ditorch.precision.isolation.runs import RunError, Runs
from ditorch.precision.loss import BAR, mean_relative_error, read_losses

EXAMPLE = ROOT / "ditorch" / "align" / "example.py"

# Gradient accumulation, a scheduler-like second optimizer, a checkpointed layer, an evaluation, and
# backward by its other name and from another thread: losses 1.0, 2.0, ... are what must be seen.
SCRIPT = """
import sys, threading
import torch, ditorch
from torch.utils.checkpoint import checkpoint

layer = torch.nn.Linear(1, 1, bias=False, device="device")
optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)

def loss_of(value):
    x = torch.ones(1, 1, device="device", requires_grad=True)
    return checkpoint(layer, x, use_reentrant=True).mean() * 0 + value

for step in range(int(sys.argv[1])):
    with torch.no_grad():
        loss_of(1e9)
    half = loss_of(step + 0.5)
    half.backward()
    half.detach().zero_()  # the script's own business
    if step % 2:
        torch.autograd.backward([loss_of(step + 1.5)])
    else:
        thread = threading.Thread(target=loss_of(step + 1.5).backward)
        thread.start()
        thread.join()
    optimizer.step()
    other.step()
    print(step, flush=True)
"""


@pytest.fixture(scope="module", autouse=True)
def runs_share_a_server() -> Iterator[None]:
    """Loading torch once for all of this file's runs."""
    with Runs(EXAMPLE):
        yield


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_the_loss_is_what_backward_starts_from_averaged_over_micro_batches(
    script: Path, tmp_path: Path
) -> None:
    with Runs(script, ["6"]) as runs:
        for chip in ("b-mini", "cpu"):
            assert runs.run(chip, tmp_path / chip).losses() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        beside = runs.run("b-mini", tmp_path / "beside", observe={})
        assert beside.losses() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        stopped = runs.run("b-mini", tmp_path / "stopped", stop_after=2)
        assert stopped.losses() == [1.0, 2.0]
        assert stopped.exit_code == 0
        selected = runs.run("cpu", tmp_path / "selected", loss={
            "output": str(tmp_path / "selected"), "steps": "1:3, 5"})  # fmt: skip
        assert selected.losses() == [2.0, 3.0, 6.0]


def test_a_killed_script_leaves_its_losses(script: Path, tmp_path: Path) -> None:
    precision = f"loss = {{output = {json.dumps(str(tmp_path))}}}"
    process = forks.start(
        [str(script), "100000"], environment("b-mini", DITORCH_PRECISION=precision)
    )
    file = tmp_path / "loss-rank0.json"
    deadline_s = time.monotonic() + 60
    for step, _ in enumerate(process.lines()):
        assert time.monotonic() < deadline_s
        if step >= 100 and file.exists():
            process.kill()
    assert process.wait() == -signal.SIGKILL
    losses = read_losses(tmp_path)
    assert losses == [step + 1.0 for step in range(len(losses))]
    assert losses


def test_a_run_that_fails_or_hangs_says_so(tmp_path: Path) -> None:
    failing = tmp_path / "failing.py"
    failing.write_text("raise OSError('no data')")
    with Runs(failing) as runs:
        run = runs.run("cpu", tmp_path / "failed")
        assert run.exit_code == 1
        with pytest.raises(RunError, match=r"no losses.*OSError: no data"):
            run.losses()
    hanging = tmp_path / "hanging.py"
    hanging.write_text("import os, time\nos.fork()\nprint(os.getpid(), flush=True)\ntime.sleep(99)")
    with Runs(hanging, deadline_s=3) as runs:
        with pytest.raises(RunError, match="did not end within 3 s on cpu"):
            runs.run("cpu", tmp_path / "hung")
        assert (tmp_path / "hung" / "log.txt").read_text().strip()
        for pid in (tmp_path / "hung" / "log.txt").read_text().split():
            deadline_s = time.monotonic() + 30
            while _is_running(int(pid)):
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
    with pytest.raises(ValueError, match=r"absent\.py: there is no such script"):
        Runs(tmp_path / "absent.py")


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.exhaustive
def test_table_1_every_emulated_chip_is_aligned_and_none_is_like_another(tmp_path: Path) -> None:
    """The paper's table 1, on a model small enough for a test; the example's own is larger."""
    small = ["--dim", "32", "--heads", "2", "--batch", "4", "--length", "16", "--steps", "300"]
    with Runs(EXAMPLE, small) as runs:
        losses = {
            chip: runs.run(chip, tmp_path / chip).losses() for chip in ("cpu", "a", "b", "c", "d")
        }
    right = losses.pop("cpu")
    assert len(right) == 300
    assert right[-1] < 0.9 * right[0]  # it learns
    errors = {chip: mean_relative_error(right, found) for chip, found in losses.items()}
    assert all(0 < error < BAR for error in errors.values()), errors
    assert len(set(errors.values())) == 4, errors


def test_the_mean_relative_error_is_the_paper_s() -> None:
    assert mean_relative_error([2.0, 4.0, -8.0], [2.0, 5.0, -6.0]) == pytest.approx((0 + 2 / 4) / 3)
    assert math.isnan(mean_relative_error([1.0, 1.0], [1.0, math.nan]))
    with pytest.raises(ValueError, match="the reference has 2 losses and the chip 3"):
        mean_relative_error([1.0, 1.0], [1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="no losses to compare"):
        mean_relative_error([], [])
    for bad in (0.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"loss of step 1 is {bad}"):
            mean_relative_error([1.0, bad], [1.0, 1.0])


def test_losses_are_read_from_a_training_run_s_metrics(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "loss": 4.5}\n{"step": 2, "loss": 4.25}\n{"step": 3, "lo')
    assert read_losses(metrics) == [4.5, 4.25]
    metrics.write_text('{"step": 1}\n{"step": 2, "loss": 4.25}\n')
    with pytest.raises(ValueError, match="line 1 has no loss"):
        read_losses(metrics)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty: no losses"):
        read_losses(tmp_path / "empty")
    with pytest.raises(ValueError, match="cannot be read"):
        read_losses(tmp_path / "absent.jsonl")
