"""Members of an elastic job, told what to do by a simple leader: they switch, and they recover."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import forkserver
import pytest
import torch.distributed as dist
from layouts import plan_of
from training_run import Training, tiny_model, write_cluster, write_text

from heteropp.description.cluster import read_cluster
from heteropp.description.cluster_writer import write_cluster as write_kept
from heteropp.description.hyperparameters import Hyperparameters
from heteropp.description.plan import Plan, write_plan
from heteropp.elastic.job import Board, Generation, Job, Meeting
from heteropp.elastic.messages import Account, Failure, Progress
from heteropp.runtime.measuring.trackers.tracking import Tracking
from heteropp.runtime.training_run import TrainingRun
from heteropp.state.checkpoint.manifest import find

MODEL = tiny_model(layers=8)
STEPS = 400
FIRST = plan_of(MODEL, (4, 4), (1, 1), (2, 1))
SECOND = plan_of(MODEL, (3, 5), (2, 1), (1, 1))
DEADLINE_S = 120


class Leader:
    def __init__(self, folder: Path, device: str) -> None:
        self.folder, self.device = folder, device
        write_cluster(folder, 4)
        self.cluster = read_cluster(folder / "cluster.toml")
        self.names = self.cluster.members
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.board = Board(self.store)
        self.job = Job(
            name="test",
            run=TrainingRun(
                plan=FIRST,
                cluster=folder / "cluster.toml" if device == "chip" else None,
                chips=(),
                steps=STEPS,
                output=folder / "run",
                data=write_text(folder / "text"),
                weights=None,
                resume=False,
                resume_from=None,
                checkpoint_every=0,
                keep=2,
                deadline_s=60,
                seed=0,
                hyperparameters=Hyperparameters(decay_steps=STEPS),
                device=device,  # type: ignore[arg-type]
            ),
            meeting=Meeting(host="127.0.0.1", port=self.store.port, answer_s=60),
            memory=folder / "memory",
            disk=folder / "disk",
            remote=None,
        )
        self.number = 0
        self.processes: dict[str, Any] = {}

    def generation(
        self, plan: Plan, places: Sequence[int], start: str, before: Sequence[int] = ()
    ) -> None:
        """Makes a generation of the chips at `places` of the cluster; starts its new members.

        before: the places of the previous generation's chips.
        """
        self.number += 1
        kept = self.cluster.kept(places)
        members = kept.members
        leavers = tuple(self.names[p] for p in before if self.names[p] not in members)
        generation = Generation(
            number=self.number,
            folder=self.folder / "generations" / f"{self.number:04d}",
            members=members,
            joiners=tuple(member for member in members if member not in self.processes),
            start=start,  # type: ignore[arg-type]
            before=self.number - 1 if start == "switch" else None,
            leavers=leavers,
        )
        write_kept(kept, generation.cluster)
        write_plan(plan, generation.plan)
        self.board.say(generation, "generation", self.number)
        self.board.say(self.number, "newest")
        for member in generation.joiners:
            process = forkserver.context().Process(
                target=_member,
                args=(self.job, member, self.number, self.folder, os.environ[SECRET]),
                daemon=True,
            )
            process.start()
            self.processes[member] = process
            if start == "switch":
                self.hear(str, "ready", self.number, member)
        if start == "switch":
            self.board.say(self.number, "next", self.number - 1)

    def hear(self, type_: type, *key: str | int) -> Any:
        deadline = time.monotonic() + DEADLINE_S
        while (said := self.board.heard(type_, *key)) is None:
            assert time.monotonic() < deadline, f"{key} is not said"
            time.sleep(0.05)
        return said

    def trained(self, steps: int) -> None:
        """Waits until the newest generation has come so far."""
        deadline = time.monotonic() + DEADLINE_S
        while (self.board.heard(Progress, "progress", self.number) or _NONE).step < steps:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def wait(self, member: str) -> int:
        process = self.processes.pop(member)
        process.join(DEADLINE_S)
        assert process.exitcode is not None, f"{member} does not end"
        return process.exitcode

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()


SECRET = "DICOMM_SECRET"
_NONE = Progress(step=-1, loss=None, tokens_per_s=0, step_s=0)


def _member(job: Job, name: str, number: int, folder: Path, secret: str) -> None:
    os.environ[SECRET] = secret  # that of who forks may be of an earlier job
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    from heteropp.elastic.member.member import run_member

    raise SystemExit(run_member(job, name, number))


@pytest.fixture(params=["cpu", pytest.param("chip", marks=pytest.mark.exhaustive)])
def leader(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Leader]:
    monkeypatch.setenv(SECRET, "of this job")
    leader = Leader(tmp_path, request.param)
    yield leader
    leader.close()


def losses(leader: Leader) -> list[float]:
    lines = (leader.folder / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [json.loads(line)["loss"] for line in lines]


def uninterrupted(folder: Path, steps: int) -> list[float]:
    """The losses of one plan, from the same sequences."""
    other = folder / "other"
    other.mkdir()
    (other / "text").symlink_to(folder / "text")
    settings = "--steps", str(steps), "--decay-steps", str(STEPS)
    return Training(other, FIRST, *settings, device="cpu").finish().losses


@pytest.mark.long
def test_a_switch_then_a_recovery_then_the_end(leader: Leader) -> None:
    """Three ranks; one goes and one comes; then one is killed, and two go on from the copies.

    The end is a checkpoint; from it they go on when the copies lack a layer.
    """
    first, second, third = (0, 1, 2), (0, 2, 3), (0, 3)
    leader.generation(FIRST, first, "initial")
    leader.trained(3)
    os.kill(leader.processes[leader.names[1]].pid, signal.SIGTERM)  # notice: nobody ends
    leader.hear(str, "notice", 1, leader.names[1])
    # from now on nobody needs what the first values were read from
    gone = replace(leader.job.run, weights=leader.folder / "gone")
    leader.job = replace(leader.job, run=gone)
    leader.generation(SECOND, second, "switch", first)
    account = leader.hear(Account, "switched", 2)
    assert leader.wait(leader.names[1]) == 0
    assert account.bytes_from("peer") and account.seconds < DEADLINE_S
    leader.trained(account.step + 3)
    os.kill(leader.processes[leader.names[2]].pid, signal.SIGKILL)
    assert [leader.wait(leader.names[p]) for p in second] == [1, -9, 1]
    leader.generation(plan_of(MODEL, (4, 4), (1, 1), (1, 1)), third, "recover")
    recovered = leader.hear(Account, "recovered", 3)
    assert recovered.step >= account.step + 2
    leader.trained(recovered.step + 2)
    leader.board.say("", "stop")
    assert [leader.wait(leader.names[p]) for p in third] == [0, 0]
    saved = len(losses(leader))
    for place in (leader.job.memory, leader.job.disk):
        for copy in place.rglob("layers.2.*.safetensors"):
            copy.unlink()
    leader.generation(plan_of(MODEL, (8,), (1,), (1,)), [3], "recover")
    assert leader.hear(Account, "recovered", 4).step == saved  # and is told to stop
    assert leader.wait(leader.names[3]) == 0
    found = losses(leader)
    assert len(found) == saved + 1 >= recovered.step + 3
    expected = uninterrupted(leader.folder, len(found))
    assert found == pytest.approx(expected, rel=2e-6)


def test_a_job_that_is_lost_after_its_last_step_still_ends_as_others(leader: Leader) -> None:
    """What has that step is copies of the state: no checkpoint, no summary."""
    alone = plan_of(MODEL, (8,), (1,), (1,))
    leader.job = replace(leader.job, run=replace(leader.job.run, steps=3))
    leader.generation(alone, (0,), "initial")
    assert leader.wait(leader.names[0]) == 0
    summary = leader.hear(str, "summary")
    leader.board.take(str, "summary")
    shutil.rmtree(leader.job.run.checkpoints)
    leader.generation(alone, (0,), "recover")
    assert leader.wait(leader.names[0]) == 0
    assert json.loads(leader.hear(str, "summary")) == json.loads(summary)
    assert leader.hear(Account, "recovered", 2).step == 3
    checkpoint = find(leader.job.run.checkpoints)
    assert checkpoint is not None and checkpoint.manifest.step == 3


def test_a_service_that_cannot_be_opened_ends_the_job_by_its_sentence(leader: Leader) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        tracking = Tracking(metrics_port=taken.getsockname()[1])
        leader.job = replace(leader.job, run=replace(leader.job.run, tracking=tracking))
        leader.generation(plan_of(MODEL, (8,), (1,), (1,)), (0,), "initial")
        assert leader.wait(leader.names[0]) == 1
    failure = leader.hear(Failure, "failed", 1, leader.names[0])
    assert failure.kind == "job"
    assert "cannot be opened: Address already in use" in failure.what
