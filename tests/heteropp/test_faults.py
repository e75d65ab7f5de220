"""A rank that dies, runs out of memory or loses its launcher ends the job, and all say why."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest
from training_run import Training, make_plan, tiny_model, write_cluster

PLAN = make_plan(tiny_model(), (1, 2, 1), (2, 1, 1), (1, 2, 1), (True, False, False))
RANKS = range(PLAN.world_size)


def session(process: int) -> dict[int, str]:
    """The living processes of a session, and their names."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, fields = (folder / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
        except OSError:
            continue  # it has just ended
        state, _, _, leader = fields.split()[:4]
        if int(leader) == process and state != "Z":
            found[int(folder.name)] = name
    return found


def named_shared_memory(process: int) -> list[str]:
    """The shared memory of a process that has a name, and so would outlive a killed owner.

    But for Python's own semaphores, which its resource tracker removes.
    """
    maps = Path(f"/proc/{process}/maps").read_text().splitlines()
    shared = [line.split(maxsplit=5)[-1] for line in maps if line.split()[1] == "rw-s"]
    named = [at for at in shared if at.startswith("/") and not at.endswith(" (deleted)")]
    return [at for at in named if not at.startswith("/dev/shm/sem.mp-")]


def rank_process(training: Training, rank: int) -> int:
    names = {name: process for process, name in session(training.process.pid).items()}
    return names[f"heteropp-{rank}"]


@pytest.fixture
def running(tmp_path: Path):
    """A run in the middle of its steps."""
    training = Training(tmp_path, PLAN, "--steps", "1000000")
    deadline = time.monotonic() + 60
    metrics = training.output / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert time.monotonic() < deadline, "the run did not start"
        assert training.process.poll() is None, training.process.communicate()
        time.sleep(0.05)
    yield training
    for process in (training.process.pid, *session(training.process.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    training.process.communicate()


def wait_until_nothing_is_left(training: Training, within_s: float = 30) -> None:
    deadline = time.monotonic() + within_s
    while left := session(training.process.pid):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.1)


@pytest.mark.parametrize("victim", [0, 4])
def test_every_rank_names_a_killed_one(running: Training, victim: int) -> None:
    for process in session(running.process.pid):
        assert named_shared_memory(process) == []
    os.kill(rank_process(running, victim), signal.SIGKILL)
    code, _, stderr = running.wait(30)
    assert code == 1
    lines = [line.strip() for line in stderr.splitlines()]
    for rank in RANKS:
        own = [line for line in lines if line.startswith(f"rank {rank} (chip NEUTRAL) stopped ")]
        assert len(own) == (rank != victim), stderr
        assert all(line.endswith(f": rank {victim} (chip NEUTRAL) died") for line in own), stderr
    assert lines[-1].startswith(f"training stopped: rank {victim} (chip NEUTRAL) died; logs are in")
    assert len(lines) == len(RANKS), stderr
    wait_until_nothing_is_left(running, 5)


def test_ranks_end_with_their_launcher(running: Training) -> None:
    os.kill(running.process.pid, signal.SIGKILL)
    wait_until_nothing_is_left(running)
    _, _, stderr = running.wait(30)
    # the others' errors went through the launcher, which is gone, but are in the logs
    assert "rank 0 (chip NEUTRAL) stopped " in stderr
    assert ": the launcher died" in stderr
    assert "Traceback" not in stderr


def test_a_launcher_that_is_told_to_stop_ends_its_ranks(running: Training) -> None:
    os.kill(running.process.pid, signal.SIGTERM)
    code, _, stderr = running.wait(30)
    assert code == 128 + signal.SIGTERM, stderr
    assert "Traceback" not in stderr
    assert "training stopped: SIGTERM received" in stderr
    wait_until_nothing_is_left(running, 5)


def test_a_forced_plan_that_does_not_fit_runs_out_of_memory(tmp_path: Path) -> None:
    write_cluster(tmp_path, PLAN.world_size, capacity_bytes=150_000)
    training = Training(tmp_path, PLAN, "--steps", "2", "--force")
    code, _, stderr = training.wait(60)
    assert code == 1
    lines = [line.strip() for line in stderr.splitlines()]
    first = re.compile(
        r"(rank \d \(chip NEUTRAL\)) ran out of memory: .*150000|(rank \d .*) ran out"
    )
    causes = [line for line in lines if " ran out of memory: " in line]
    assert causes == lines, stderr
    assert first.match(next(line for line in lines if "stopped" not in line)), stderr
    assert "Traceback" not in stderr
    wait_until_nothing_is_left(training, 5)
