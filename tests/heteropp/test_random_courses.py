"""What the leader of an elastic job decides, whatever happens in whatever order."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from elastic_world import MEMBERS, NODES, World
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)

from heteropp.elastic.decisions.commands import FirstStart
from heteropp.elastic.decisions.events import (
    MemberEnded,
    MemberReady,
    PlanFound,
    ReadingBegun,
    SilentMembersNamed,
    StateReady,
    StepDone,
    SwitchBegun,
)
from heteropp.elastic.decisions.phases import (
    Awaiting,
    Dropping,
    Joining,
    Running,
    Starting,
    Switching,
)
from heteropp.elastic.messages import Account, Failure, Progress

LACK = Failure(kind="lost", what="stopped: layers.1 has no snapshot left", nodes=("c",))
FAILURES = (
    *(None, None, None, None),  # it ended because of another, or by a signal
    Failure(kind="chip", what="failed: a chip's error"),
    Failure(kind="other", what="failed: another error"),
    Failure(kind="job", what="ran out of memory"),
    LACK,
)


some_members = st.sets(st.sampled_from(MEMBERS), min_size=1)
a_member = st.sampled_from(MEMBERS)
a_node = st.sampled_from(tuple(NODES))


def during(*phases: type[Any]) -> Any:
    """A rule that there is in some phases alone: in others nothing would come of it."""
    return precondition(lambda self: isinstance(self.world.state.phase, phases))


unless_over = precondition(lambda self: self.world.outcome is None)


class AnyCourse(RuleBasedStateMachine):
    """Anything may happen at any time; the world checks every decision, and the end."""

    @initialize(
        start=st.sampled_from(["initial", "recover"]),
        chips=st.sampled_from([NODES, {"a": 2, "b": 1}, {"a": 1}]),
        rounds=st.sampled_from([0, 1, 2, 4, 12]),
        more=st.booleans(),
    )
    def begin(self, start: FirstStart, chips: dict[str, int], rounds: int, more: bool) -> None:
        """Courses begin with a job that is just being started, or trains, or is to switch."""
        self.world = World(start, chips)
        self.all_goes_well(rounds)
        if more:
            self.a_plan_for_other_chips_is_found(**NODES)

    @rule(passed_s=st.sampled_from([0.0, 0.1, 0.1, 1.0, 35.0, 70.0, 130.0, 700.0]))
    def time_passes(self, passed_s: float) -> None:
        self.world.tick(passed_s)

    @during(Joining, Switching, Starting, Dropping, Awaiting)
    @rule(passed_s=st.sampled_from([35.0, 130.0, 700.0]))
    def nothing_comes_in_time(self, passed_s: float) -> None:
        self.world.tick(passed_s)

    @unless_over
    @rule(times=st.integers(1, 6))
    def all_goes_well(self, times: int) -> None:
        for _ in range(times):
            self.world.help()
            self.world.tick(1.0)

    @rule(a=st.integers(0, 2), b=st.integers(0, 2), c=st.integers(0, 1))
    def chips_are_offered(self, a: int, b: int, c: int) -> None:
        self.world.offer(a=a, b=b, c=c)

    @rule(member=a_member)
    def notice_is_given(self, member: str) -> None:
        self.world.notice(member)

    @unless_over
    @rule(members=st.lists(a_member, max_size=2))
    def members_are_silent(self, members: list[str]) -> None:
        self.world.silent = tuple(members)

    @precondition(lambda self: self.world.alive)
    @rule(data=st.data(), code=st.sampled_from([-9, -15, 1]), failure=st.sampled_from(FAILURES))
    def a_member_dies(self, data: st.DataObject, code: int, failure: Failure | None) -> None:
        member = data.draw(st.sampled_from(sorted(self.world.alive)))
        self.world.die(member, code, failure)

    @unless_over
    @rule(node=a_node)
    def a_node_is_lost(self, node: str) -> None:
        self.world.lose_node(node)

    @precondition(lambda self: self.world.told_to_end)
    @rule()
    def agents_kill(self) -> None:
        self.world.agents_kill()

    @precondition(lambda self: self.world.search)
    @rule(members=st.one_of(st.none(), some_members, st.just(set(MEMBERS))))
    def a_plan_is_searched(self, members: set[str] | None) -> None:
        self.world.find_plan(members)
        self.world.tick()

    @during(Running)
    @rule(a=st.integers(0, 2), b=st.integers(0, 2), c=st.integers(0, 1))
    def a_plan_for_other_chips_is_found(self, a: int, b: int, c: int) -> None:
        self.world.offer(a=a, b=b, c=c)
        self.world.tick()
        self.world.find_plan(MEMBERS)
        self.world.tick()

    @during(Joining)
    @rule(member=a_member)
    def the_chips_change_again(self, member: str) -> None:
        self.world.notice(member)
        self.world.tick()

    @during(Joining)
    @rule()
    def joiners_open_chips(self) -> None:
        self.world.joiners_open_chips()
        self.world.tick()

    @during(Switching)
    @rule()
    def the_switch_begins(self) -> None:
        self.world.begin_switch()

    @during(Starting)
    @rule()
    def a_recovery_reads(self) -> None:
        self.world.read()

    @during(Starting)
    @rule(times=st.integers(1, 4), with_state=st.booleans())
    def starts_fail_in_a_row(self, times: int, with_state: bool) -> None:
        world = self.world
        for _ in range(times):
            if with_state:
                world.get_state()
                world.tick()
            for member in list(world.alive):
                world.die(member, code=1)
            world.tick()
            world.find_plan(MEMBERS)
            world.tick()

    @during(Starting, Switching)
    @rule()
    def a_generation_has_its_state(self) -> None:
        self.world.get_state()

    @precondition(lambda self: self.world.state.current)
    @rule()
    def a_step_is_done(self) -> None:
        self.world.train()

    @precondition(lambda self: self.world.stopped or self.world.step > 20)
    @rule(members=st.one_of(some_members, st.just(set(MEMBERS))))
    def training_ends(self, members: set[str]) -> None:
        self.world.end_in_order(members)
        self.world.tick()

    @during(Running)
    @rule()
    def leavers_end(self) -> None:
        self.world.leavers_end()

    @precondition(lambda self: self.world.step > 3 or self.world.number > 2)
    @rule()
    def the_user_stops_the_job(self) -> None:
        self.world.stop()

    @unless_over
    @rule(member=a_member, back=st.integers(1, 3))
    def what_is_said_of_the_past_has_no_effect(self, member: str, back: int) -> None:
        world = self.world
        number, before = world.number - back, world.state
        account = Account(step=0, seconds=0)
        progress = Progress(step=world.step, loss=None, tokens_per_s=1, step_s=1)
        if before.next and before.current and before.current.number == number:
            return  # that is not past yet
        world.happens(MemberReady, number=number, member=member)
        world.happens(SwitchBegun, number=number)
        world.happens(ReadingBegun, number=number)
        world.happens(StateReady, number=number, account=account)
        world.happens(PlanFound, search=before.searches - back, members=(member,))
        if before.current is None or before.current.number != number:
            world.happens(StepDone, number=number, progress=progress)
        if before.live:  # no fence has asked for them
            world.happens(SilentMembersNamed, members=(member,))
        if before.live.get(member) != number:
            world.happens(MemberEnded, member=member, number=number, code=-9, killed=False)
        assert world.state == before

    def teardown(self) -> None:
        """A job that is told to stop ends, even if nobody does anything for it any more."""
        if not hasattr(self, "world"):
            return
        world = self.world
        if world.outcome is None:
            if len(world.asked) % 2:  # either way, whatever came before
                self._ends_with_help(world)
            else:
                self._ends_without_help(world)
        assert world.outcome is not None
        world.tick(1e6)  # an outcome is final

    def _ends_with_help(self, world: World) -> None:
        world.stop()
        for _ in range(100):
            world.help()
            world.tick(1.0)
            if world.outcome:
                break
        assert world.outcome and not world.alive

    def _ends_without_help(self, world: World) -> None:
        for _ in range(15):
            world.tick(50.0)
        world.stop()
        for _ in range(100):
            world.tick(10.0)
            if world.outcome:
                break
        assert world.outcome


AnyCourse.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestAnyCourse = AnyCourse.TestCase
