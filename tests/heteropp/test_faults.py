"""What goes wrong on long runs: the job ends and every rank says why, goes on, or starts again."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from installed import own_mounts
from parity import STEPS, TOLERANCE, Ranks
from training_run import (
    Training,
    command,
    make_plan,
    session,
    start,
    tiny_model,
    wait,
    wait_until_nothing_is_left,
    write_cluster,
    write_text,
)

from heteropp.description.plan import write_plan

PLAN = make_plan(tiny_model(), (1, 2, 1), (2, 1, 1), (1, 2, 1), (True, False, False))
RANK_1 = "heteropp-1"
RANKS = range(PLAN.world_size)


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


Launch = Callable[..., Training]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts a run that does not end by itself, and waits until it is amidst its steps."""
    launched: list[Training] = []

    def launch(*arguments: str) -> Training:
        training = Training(tmp_path, PLAN, "--steps", "1000000", *arguments)
        launched.append(training)
        wait_for_steps(training, 3)
        return training

    yield launch
    for training in launched:
        for process in (training.process.pid, *session(training.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        training.process.communicate()


@pytest.fixture
def running(launch: Launch) -> Training:
    return launch()


def wait_until(training: Training, happened: Callable[[], object], within_s: float = 60) -> None:
    deadline_s = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < deadline_s, training.process.errors()
        assert training.process.poll() is None, training.process.communicate()
        time.sleep(0.05)


def wait_for_steps(training: Training, steps: int, within_s: float = 60) -> None:
    metrics = training.output / "metrics.jsonl"
    wait_until(
        training, lambda: metrics.exists() and metrics.read_text().count("\n") >= steps, within_s
    )


def said(stderr: str) -> list[str]:
    """Its lines, but for those by which a slow machine shows that ranks are still starting."""
    lines = [line.strip() for line in stderr.splitlines()]
    return [line for line in lines if not re.fullmatch(r"starting \d+ ranks: \d+ s", line)]


def assert_all_name(victim: int, lines: list[str]) -> None:
    """One line of each of the other ranks."""
    assert len(lines) == len(RANKS) - 1, lines
    for rank in set(RANKS) - {victim}:
        (own,) = (line for line in lines if line.startswith(f"rank {rank} (chip NEUTRAL) stopped "))
        assert own.endswith(f": rank {victim} (chip NEUTRAL) died"), own


def test_every_rank_names_a_killed_one(running: Training) -> None:
    for process in session(running.process.pid):
        assert named_shared_memory(process) == []
    os.kill(rank_process(running, 0), signal.SIGKILL)
    code, _, stderr = running.wait(60)
    assert code == 1
    *lines, last = said(stderr)
    assert_all_name(0, lines)
    assert last.startswith("training stopped: rank 0 (chip NEUTRAL) died; logs are in")
    wait_until_nothing_is_left(running, 5)


def test_ranks_end_with_their_launcher(running: Training) -> None:
    os.kill(running.process.pid, signal.SIGKILL)
    wait_until_nothing_is_left(running)
    _, _, stderr = running.wait(60)
    # the others' errors went through the launcher, which is gone, but are in the logs
    assert "rank 0 (chip NEUTRAL) stopped " in stderr
    assert ": the launcher died" in stderr
    assert "Traceback" not in stderr


def test_a_forced_plan_that_does_not_fit_runs_out_of_memory(tmp_path: Path) -> None:
    write_cluster(tmp_path, PLAN.world_size, capacity_bytes=150_000)
    training = Training(tmp_path, PLAN, "--steps", "2", "--force")
    code, _, stderr = training.wait(60)
    assert code == 1
    lines = said(stderr)
    first = re.compile(
        r"(rank \d \(chip NEUTRAL\)) ran out of memory: .*150000|(rank \d .*) ran out"
    )
    causes = [line for line in lines if " ran out of memory: " in line]
    assert causes == lines, stderr
    assert first.match(next(line for line in lines if "stopped" not in line)), stderr
    assert "Traceback" not in stderr
    wait_until_nothing_is_left(training, 5)


SETTINGS = ("--steps", "24", "--checkpoint-every", "5", "--warmup-steps", "2")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The metrics of a run without a fault."""
    folder = tmp_path_factory.mktemp("whole")
    return Training(folder, PLAN, *SETTINGS).finish().metrics


def assert_same(metrics: list[dict], expected: list[dict]) -> None:
    """Asserts that the metrics are equal bit for bit."""
    for name in ("step", "loss", "gradient_norm", "learning_rate"):
        assert [line[name] for line in metrics] == [line[name] for line in expected]


@pytest.mark.long
def test_a_rank_that_is_told_to_stop_stops_all_and_costs_nothing(
    whole: list[dict], launch: Launch, tmp_path: Path
) -> None:
    training = launch(*SETTINGS)
    os.kill(rank_process(training, 2), signal.SIGTERM)
    code, stdout, stderr = training.wait(60)
    assert (code, said(stderr)) == (128 + signal.SIGTERM, [])
    steps = len(training.metrics)
    assert f"told to stop: step {steps} is saved, and --resume goes on from it" in stdout
    code, _, stderr = wait(start(tmp_path, "--resume", "--steps", "24"), 60)
    assert code == 0, stderr
    assert_same(training.metrics, whole)
    assert steps < len(training.metrics)


def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(
    whole: list[dict], launch: Launch
) -> None:
    training = launch(*SETTINGS, "--restarts", "1")
    wait_for_steps(training, 7)
    os.kill(rank_process(training, 3), signal.SIGKILL)
    code, _, stderr = training.wait(60)
    assert code == 0, stderr
    *lines, last = said(stderr)
    assert_all_name(3, lines)
    again = re.fullmatch(
        r"starting again from step (\d+) after this: rank 3 \(chip NEUTRAL\) died", last
    )
    assert again and int(again[1]) % 5 == 0, last
    assert_same(training.metrics, whole)


@pytest.mark.long
def test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    """The disk has room for one checkpoint and a half."""
    elements = sum(math.prod(parameter.shape) for parameter in PLAN.model.parameters())
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    write_plan(PLAN, tmp_path / "plan.json")
    write_text(tmp_path / "text")
    script = f"mount -t tmpfs -o size={elements * 3 * 4 * 8 // 5} disk {checkpoints} || exit 3; "
    script += f'"$@"; code=$?; ls -A {checkpoints}; exit $code'
    process = subprocess.run(
        [
            *(*own_mounts(), "sh", "-c", script, "sh"),
            *(sys.executable, "-m", "heteropp.cli.train"),
            *command(tmp_path, "--device", "cpu", *SETTINGS),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    assert process.returncode == 1, process.stderr
    assert process.stdout.splitlines()[-1] == "step-000005"
    assert re.search(
        r"training stopped: rank \d \(.*\) stopped: "
        rf"{checkpoints}/.step-000010.partial/.*safetensors cannot be written: No space left",
        process.stderr.splitlines()[-1],
    )
    assert "Traceback" not in process.stderr


@pytest.mark.long
def test_a_paused_rank_is_named_and_waited_for(launch: Launch) -> None:
    """Then the launcher is told to stop."""
    training = launch("--device", "cpu")
    paused = rank_process(training, 2)
    os.kill(paused, signal.SIGSTOP)
    time.sleep(20)
    os.kill(paused, signal.SIGCONT)
    steps = len(training.metrics)
    wait_for_steps(training, steps + 3, 30)
    os.kill(training.process.pid, signal.SIGTERM)
    code, stdout, stderr = training.wait(60)
    assert code == 128 + signal.SIGTERM, stderr
    lines = said(stderr)
    rank = "rank 2 (chip neutral.toml)"
    assert lines[0] == f"{rank} has not answered for 10 s"
    assert re.fullmatch(rf"{re.escape(rank)} answers again, after [12]\d s", lines[1])
    assert lines[2:] == ["training stopped: SIGTERM received"]
    steps = len(training.metrics)
    assert f"told to stop: step {steps} is saved, and --resume goes on from it" in stdout
    names = [path.name for path in (training.output / "checkpoints").iterdir()]
    assert names == [f"step-{steps:06d}"]
    wait_until_nothing_is_left(training, 5)


@pytest.mark.long
def test_a_long_start_says_that_it_goes_on(tmp_path: Path) -> None:
    training = Training(
        tmp_path, make_plan(tiny_model(), (4,), (2,), (1,), (False,)), "--steps", "2"
    )
    wait_until(training, lambda: RANK_1 in session(training.process.pid).values())
    paused = rank_process(training, 1)
    os.kill(paused, signal.SIGSTOP)
    told = re.compile(r"^starting 2 ranks: \d+ s$", re.MULTILINE)
    wait_until(training, lambda: told.search(training.process.errors()))
    os.kill(paused, signal.SIGCONT)
    code, stdout, stderr = training.wait(60)
    assert code == 0, stderr
    assert "starting 2 ranks" not in stdout


@pytest.mark.long
def test_a_rank_paused_past_the_deadline_ends_the_job(launch: Launch) -> None:
    training = launch("--device", "cpu", "--deadline", "10")
    os.kill(rank_process(training, 2), signal.SIGSTOP)
    code, _, stderr = training.wait(60)
    assert code == 1, stderr
    cause = "rank 2 (chip neutral.toml) has not answered for 10 s"
    assert f"training stopped: {cause}" in stderr
    for rank in set(RANKS) - {2}:
        assert re.search(rf"rank {rank} .* stopped .*: {re.escape(cause)}", stderr), stderr
    wait_until_nothing_is_left(training, 5)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    running = Ranks()
    yield running
    running.close()


def test_a_step_with_a_nan_micro_batch_changes_nothing(ranks: Ranks) -> None:
    plan = make_plan(tiny_model(dtype="float64"), (2, 2), (2, 1), (1, 2), (True, False))
    ours, plain = ranks.train(plan, poisoned=2), ranks.plainly(plan, without=2)
    assert math.isnan(ours.losses[2])
    assert not math.isfinite(ours.norms[2])
    for step in set(range(STEPS)) - {2}:
        assert ours.losses[step] == pytest.approx(plain.losses[step], rel=TOLERANCE["float64"])
    for name, expected in plain.parameters.items():
        error = (ours.parameters[name] - expected).abs().max() / expected.abs().max()
        assert error <= TOLERANCE["float64"], name


def test_a_run_that_diverges_stops(tmp_path: Path) -> None:
    training = Training(
        tmp_path,
        PLAN,
        *("--steps", "20", "--learning-rate", "1e35", "--warmup-steps", "0"),
        *("--checkpoint-every", "1", "--most-skipped", "3"),
        device="cpu",
    )
    code, stdout, stderr = training.wait(60)
    assert code == 1
    assert "stopped: 3 steps in a row went wrong; in the last the " in stderr
    assert "Traceback" not in stderr
    *_, before, last = training.metrics
    assert before["skipped"] and before["gradient_norm"] is None
    assert last["skipped"]
    assert re.search("warning: the (loss|gradient norm) is (nan|inf): skipped", stdout)
