"""What the leader of an elastic job decides, where a test says what became of its members."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from clusters import write_cluster
from layouts import plan_of
from training_run import tiny_model

from heteropp.description.cluster import read_cluster
from heteropp.description.hyperparameters import Hyperparameters
from heteropp.elastic.decisions import awaited
from heteropp.elastic.decisions.phases import Fencing, Joining, Running, Starting
from heteropp.elastic.decisions.roster import Roster
from heteropp.elastic.job import Board, Generation, Job, Meeting
from heteropp.elastic.launcher import leader, pulse
from heteropp.elastic.launcher.leader import Leader
from heteropp.elastic.launcher.pulse import Pulse
from heteropp.elastic.messages import Account, Ended, Failure
from heteropp.runtime.training_run import TrainingRun

DEADLINE_S = 30.0
A, B = "a-mini-0", "b-mini-0"
SILENT = r"is lost: its node has not answered for 3\d s, and its lease is over"
LACK = f"stopped: layers.1 has no snapshot left: the last were of step 9, on node {B}"


class Chips:
    """Availability, as a test has it."""

    def __init__(self, **chips: int) -> None:
        self.offer(**chips)

    def offer(self, a: int, b: int) -> None:
        self.chips = {A: a, B: b}

    def take_warning(self) -> None:
        return None


class Clock:
    """Stands still at a time."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def monotonic(self) -> float:
        return self.now_s


class Recovery:
    """The leader of a job that two nodes of a chip each trained, whose only agent is the test."""

    def __init__(self, folder: Path, chips: Chips, agents: Collection[str] = ()) -> None:
        """agents: nodes whose agents shall show that they are alive."""
        path = write_cluster(folder / "cluster.toml", ("a-mini", 1), ("b-mini", 1))
        cluster = read_cluster(path)
        model = tiny_model(layers=2)
        names = [cluster.node(rank).chip_name for rank in range(2)]
        plan = plan_of(model, (1, 1), (1, 1), (1, 1))
        (pipeline,) = plan.pipelines
        stages = [
            replace(stage, replicas=(replace(stage.replicas[0], chip=name),))
            for stage, name in zip(pipeline.stages, names, strict=True)
        ]
        plan = replace(plan, pipelines=(replace(pipeline, stages=tuple(stages)),))
        run = TrainingRun(
            plan=plan,
            cluster=path,
            chips=(),
            steps=100,
            output=folder / "run",
            data=folder,
            weights=None,
            resume=True,
            resume_from=None,
            checkpoint_every=0,
            keep=2,
            deadline_s=DEADLINE_S,
            seed=0,
            hyperparameters=Hyperparameters(),
            device="cpu",
        )
        store = dist.HashStore()
        self.board = Board(store)
        job = Job(
            name="test",
            run=run,
            meeting=Meeting(host="localhost", port=0, answer_s=60),
            memory=folder / "memory",
            disk=folder / "disk",
            remote=None,
        )
        self.told: list[str] = []
        self.leader = Leader(
            job,
            cluster,
            Roster.of(cluster.members, chips.chips),
            store,
            Pulse(self.board, agents, DEADLINE_S, self.told.append),
            chips,  # type: ignore[arg-type]
            10,
            self.told.append,
            None,
            "recover",
            cluster.members,
        )

    def until(self, comes: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 60
        while not comes():
            assert time.monotonic() < deadline_s, (self.leader.state.phase, self.told)
            self.leader.turn()
            time.sleep(0.01)

    def generation(self, number: int) -> Generation:
        self.until(lambda: self.board.heard(int, "newest") == number)
        return self.board.hear(Generation, "generation", number)

    def lacks(self, generation: Generation) -> None:
        """All of its members end, as node b alone had layers.1."""
        for member in generation.members:
            failure = Failure(kind="lost", what=LACK, nodes=(B,))
            self.board.say(failure, "failed", generation.number, member)
            ended = Ended(code=1, killed=False)
            self.board.say(ended, "ended", generation.number, member)
        self.until(lambda: not self.leader.state.live)
        self.leader.turn()


def test_a_recovery_waits_for_a_node_that_lost_its_chips(tmp_path: Path) -> None:
    """Its disk has what the others lack, and the chip comes back."""
    chips = Chips(a=1, b=0)
    recovery = Recovery(tmp_path, chips)
    first = recovery.generation(1)
    assert first.members == (f"{A}/0",)
    recovery.lacks(first)
    assert recovery.leader.outcome is None
    assert recovery.told[-1] == f"{A}/0 {LACK}; {B} may come back within 120 s"
    chips.offer(a=1, b=1)
    second = recovery.generation(2)
    assert second.start == "recover" and set(second.members) == {f"{A}/0", f"{B}/0"}


def test_a_node_that_does_not_come_back_is_not_awaited_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(awaited, "WAITED_DEADLINES", 0)
    recovery = Recovery(tmp_path, Chips(a=1, b=0))
    recovery.lacks(recovery.generation(1))
    recovery.until(lambda: recovery.leader.outcome is not None)
    outcome = recovery.leader.outcome
    assert outcome and outcome.exit_code == 1
    assert outcome.sentence == f"{A}/0 {LACK}; {B} did not come back in 0 s"


def test_what_a_node_that_is_there_lost_is_not_waited_for(tmp_path: Path) -> None:
    recovery = Recovery(tmp_path, Chips(a=1, b=1))
    recovery.lacks(recovery.generation(1))
    outcome = recovery.leader.outcome
    assert outcome and outcome.exit_code == 1
    assert re.fullmatch(rf"[ab]-mini-0/0 {LACK}", outcome.sentence or "")


def test_members_may_be_slow_to_come_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy host's are, by more than the deadline that they have for each other."""
    recovery = Recovery(tmp_path, Chips(a=1, b=1))
    recovery.generation(1)
    begin_s = time.monotonic()
    monkeypatch.setattr(leader, "time", Clock(begin_s + DEADLINE_S + 30))
    recovery.leader.turn()
    assert isinstance(recovery.leader.state.phase, Starting) and not recovery.told
    monkeypatch.setattr(leader, "time", Clock(begin_s + DEADLINE_S + 90))
    recovery.leader.turn()
    assert recovery.told == ["training did not start in time"]


def test_what_an_earlier_process_of_a_member_said_is_not_believed(tmp_path: Path) -> None:
    """Its words may come late: its machine was cut off, and its kernel still had them."""
    recovery = Recovery(tmp_path, Chips(a=1, b=1))
    first = recovery.generation(1)
    for member in first.members:
        recovery.board.say(Ended(code=1, killed=False), "ended", 1, member)
    second = recovery.generation(2)
    for member in second.members:
        recovery.board.say("", "notice", 1, member)
        recovery.board.say(Failure(kind="chip", what="failed: late"), "failed", 1, member)
        recovery.board.say(Ended(code=-9, killed=False), "ended", 1, member)
    for _ in range(3):
        recovery.leader.turn()
    assert set(recovery.leader.state.roster.up()) == set(second.members)
    recovery.board.say(Ended(code=1, killed=False), "ended", 2, second.members[0])
    recovery.until(lambda: isinstance(recovery.leader.state.phase, Fencing))
    assert not any("late" in sentence for sentence in recovery.told)


def let_pass(recovery: Recovery, monkeypatch: pytest.MonkeyPatch, turns: int = 8) -> None:
    """Lets some seconds pass for the leader's pulse before each turn; in eight a deadline does."""
    for _ in range(turns):  # more than that at once would be a pause of the leader's own
        clock = Clock(recovery.leader.pulse.next_s + 4)
        monkeypatch.setattr(pulse, "time", clock)
        recovery.leader.turn()
    monkeypatch.undo()


def lose_b(recovery: Recovery, monkeypatch: pytest.MonkeyPatch) -> Generation:
    """Its agent falls silent; returns the generation without it. Nobody says who ended."""
    let_pass(recovery, monkeypatch)
    recovery.until(lambda: recovery.board.heard(str, "end", 1, f"{A}/0") is not None)
    recovery.board.say(Ended(code=-9, killed=True), "ended", 1, f"{A}/0")
    return recovery.generation(2)


def test_a_node_that_vanishes_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recovery = Recovery(tmp_path, Chips(a=1, b=1), agents=[B])
    assert set(recovery.generation(1).members) == {f"{A}/0", f"{B}/0"}
    second = lose_b(recovery, monkeypatch)
    assert recovery.told[0] == f"node {B} has not answered for 10 s"
    assert second.members == (f"{A}/0",)
    assert re.fullmatch(rf"{B}/0 {SILENT}", second.cause)


def test_a_node_without_power_is_lost_as_often_as_it_is_offered_until_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chips = Chips(a=1, b=1)
    recovery = Recovery(tmp_path, chips, agents=[B])
    recovery.generation(1)
    lose_b(recovery, monkeypatch)
    recovery.board.say(Account(step=0, seconds=0), "recovered", 2)
    recovery.until(lambda: isinstance(recovery.leader.state.phase, Running))

    def offer_b_again() -> None:
        chips.offer(a=1, b=0)
        recovery.leader.turn()
        chips.offer(a=1, b=1)
        recovery.leader.turn()

    offer_b_again()
    let_pass(recovery, monkeypatch)
    recovery.until(lambda: sum(f"{B}/0 is lost" in sentence for sentence in recovery.told) == 2)
    recovery.until(lambda: isinstance(recovery.leader.state.phase, Running))
    assert recovery.leader.state.roster.up() == recovery.leader.state.live.keys() == {f"{A}/0"}
    recovery.board.say(1, "beat", B)
    let_pass(recovery, monkeypatch, turns=1)
    recovery.until(lambda: any("answers again" in sentence for sentence in recovery.told))
    offer_b_again()
    recovery.until(lambda: isinstance(recovery.leader.state.phase, Joining))
    assert recovery.leader.state.live.keys() == {f"{A}/0", f"{B}/0"}


def test_a_node_that_dies_before_the_deadline_is_left_out_when_its_lease_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its peers see of it ends them; the end of its member is what the leader waits for."""
    recovery = Recovery(tmp_path, Chips(a=1, b=1), agents=[B])
    recovery.generation(1)
    recovery.board.say(Ended(code=1, killed=False), "ended", 1, f"{A}/0")
    recovery.until(lambda: isinstance(recovery.leader.state.phase, Fencing))
    for _ in range(2):
        now_s = recovery.leader.pulse.next_s + 4
        monkeypatch.setattr(pulse, "time", Clock(now_s))
        recovery.leader.turn()
    assert isinstance(recovery.leader.state.phase, Fencing)
    monkeypatch.setattr(leader, "time", Clock(time.monotonic() + 33))
    recovery.leader.turn()
    assert isinstance(recovery.leader.state.phase, Fencing)
    assert f"not ended yet: {B}/0; the lease is awaited, at most 30 s" in recovery.told
    let_pass(recovery, monkeypatch, turns=6)
    second = recovery.generation(2)
    assert second.members == (f"{A}/0",)
    assert re.fullmatch(rf"{B}/0 {SILENT}", second.cause)
