"""An agent with real processes, of a job whose leader is the test."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch.distributed as dist
from layouts import plan_of
from training_run import tiny_model

from heteropp.description.hyperparameters import Hyperparameters
from heteropp.elastic.job import Board, Generation, Job, Meeting
from heteropp.elastic.launcher.agent import Agent
from heteropp.elastic.messages import Ended, Failure
from heteropp.runtime.training_run import TrainingRun

MEMBER, OTHER = "a/0", "a/1"
LONG_S = 600.0


def sleep(job: Job, member: str, number: int) -> int:
    """A member that does not hear that it is to end."""
    time.sleep(LONG_S)
    return 0


class Leader:
    """The test, as the agent hears it."""

    def __init__(self, folder: Path, deadline_s: float) -> None:
        run = TrainingRun(
            plan=plan_of(tiny_model(layers=1), (1,), (1,), (1,)),
            cluster=folder / "cluster.toml",
            chips=(),
            steps=1,
            output=folder / "run",
            data=folder,
            weights=None,
            resume=False,
            resume_from=None,
            checkpoint_every=0,
            keep=2,
            deadline_s=deadline_s,
            seed=0,
            hyperparameters=Hyperparameters(),
            device="cpu",
        )
        job = Job(
            name="test",
            run=run,
            meeting=Meeting(host="localhost", port=0, answer_s=60),
            memory=folder / "memory",
            disk=folder / "disk",
            remote=None,
        )
        self.board = Board(dist.HashStore())
        self.agent = Agent(job, ["a"], self.board, sleep, is_leased=True)
        self.folder = folder

    def announce(self, number: int, start: Literal["recover", "switch"] = "recover") -> None:
        """A switch adds OTHER to MEMBER, who goes on."""
        adds = start == "switch"
        generation = Generation(
            number=number,
            folder=self.folder,
            members=(MEMBER, OTHER) if adds else (MEMBER,),
            joiners=(OTHER,) if adds else (MEMBER,),
            start=start,
        )
        self.board.say(generation, "generation", number)
        self.board.say(number, "newest")

    def have_it_killed(self) -> None:
        """Has MEMBER started for generation 1, and killed by somebody else."""
        self.announce(1)
        self.agent.turn()
        process = self.agent.started[MEMBER].process
        assert process.pid
        os.kill(process.pid, signal.SIGKILL)
        process.join()

    def until(self, comes: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + 120
        while not comes():
            assert time.monotonic() < deadline_s
            self.agent.turn()
            self.agent.wait(0.05)

    def hear_end(self, number: int) -> Ended:
        self.until(lambda: self.board.heard(Ended, "ended", number, MEMBER))
        return self.board.hear(Ended, "ended", number, MEMBER)


@pytest.fixture
def leader(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Leader]:
    found = Leader(tmp_path, getattr(request, "param", LONG_S))
    yield found
    found.agent.close()


def test_a_generation_waits_for_processes_that_are_to_end(leader: Leader) -> None:
    leader.announce(1)
    leader.agent.turn()
    leader.board.say("", "end", 1, MEMBER)
    leader.announce(2)
    leader.agent.turn()
    assert leader.agent.started[MEMBER].number == 1
    assert leader.hear_end(1).killed
    leader.until(lambda: MEMBER in leader.agent.started)
    assert leader.agent.started[MEMBER].number == 2


def test_a_member_whose_end_the_leader_has_not_heard_is_not_started_again(leader: Leader) -> None:
    """The leader would know nothing of that process, which would be in the way of a later one."""
    leader.have_it_killed()
    leader.announce(2, "switch")
    assert leader.hear_end(1).code == -signal.SIGKILL
    leader.until(lambda: OTHER in leader.agent.started)
    assert MEMBER not in leader.agent.started


def test_a_member_that_the_kernel_killed_may_have_stood_still(leader: Leader) -> None:
    leader.have_it_killed()
    assert leader.hear_end(1) == Ended(code=-signal.SIGKILL, killed=False)
    what = "was killed by SIGKILL, or stood still for 27 s"
    assert leader.board.heard(Failure, "failed", 1, MEMBER) == Failure(kind="chip", what=what)


@pytest.mark.parametrize("leader", [10.0], indirect=True)
def test_a_member_that_ends_with_its_lease_has_a_cause(leader: Leader) -> None:
    """Also where the store answers again just after it: the lease itself has not run out then."""
    leader.announce(1)
    leader.hear_end(1)
    what = "ended, as its node had not reached the job's store for 8 s"
    assert leader.board.heard(Failure, "failed", 1, MEMBER) == Failure(kind="other", what=what)
