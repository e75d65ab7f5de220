"""What a rank costs its machine while it waits for another."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from training_run import Training, make_plan, session, tiny_model

PLAN = make_plan(tiny_model(), (2, 2), (1, 1), (1, 1), (False, False))
PAUSE_S = 2.0
PAUSES = 4  # one may fall between two steps, which counts for neither


def cpu_s(process: int) -> float:
    """Returns what a process has computed until now."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.long
def test_a_rank_that_waits_leaves_its_core_to_others(tmp_path: Path) -> None:
    training = Training(tmp_path, PLAN, "--steps", "1000000")
    metrics, deadline_s = training.output / "metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() or not metrics.stat().st_size:
        assert time.monotonic() < deadline_s and training.process.poll() is None
        time.sleep(0.05)
    ranks = {name: process for process, name in session(training.process.pid).items()}
    for _ in range(PAUSES):
        os.kill(ranks["heteropp-1"], signal.SIGSTOP)
        time.sleep(0.5)  # the other waits by now
        written, before_s = metrics.stat().st_size, cpu_s(ranks["heteropp-0"])
        time.sleep(PAUSE_S)
        used_s = cpu_s(ranks["heteropp-0"]) - before_s
        waited = metrics.stat().st_size == written
        os.kill(ranks["heteropp-1"], signal.SIGCONT)
        assert waited
        assert used_s < 0.2 * PAUSE_S
        time.sleep(0.5)
    training.process.send_signal(signal.SIGTERM)
    code, stdout, stderr = training.wait()
    assert code == 128 + signal.SIGTERM, stdout + stderr
    paused = [line for line in training.metrics if line["step_s"] > PAUSE_S]
    assert paused, "every pause fell between two steps"
    assert all(0 < line["waiting_cpu"] < 0.2 for line in paused)
