"""A model of what the leader's commands reach: agents, members, a planner; and what must hold.

It has no processes and no time of its own. A test says what happens in it, the leader's decisions
are made by `react`, and every decision is checked against what is really alive.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from heteropp.elastic.decisions.commands import (
    AnnounceStop,
    AnnounceSwitch,
    Command,
    FirstStart,
    KillMembers,
    NameSilentMembers,
    PlannedGeneration,
    SearchPlan,
    StartMembers,
    Tell,
)
from heteropp.elastic.decisions.events import (
    ChipsOffered,
    Event,
    MemberEnded,
    MemberReady,
    NodeLost,
    NoticeGiven,
    PlanFailed,
    PlanFound,
    ReadingBegun,
    SilentMembersNamed,
    StateReady,
    StepDone,
    StopRequested,
    SwitchBegun,
    Tick,
    TimePassed,
)
from heteropp.elastic.decisions.fences import TRIES
from heteropp.elastic.decisions.machine import Decision, begin, react
from heteropp.elastic.decisions.phases import (
    Awaiting,
    Dropping,
    Fencing,
    Joining,
    Over,
    Planning,
    Running,
    Starting,
    Switching,
)
from heteropp.elastic.decisions.roster import Roster
from heteropp.elastic.decisions.state import JobSettings, JobState
from heteropp.elastic.decisions.turns import READ_S
from heteropp.elastic.messages import Account, Failure, JobOutcome, Progress, node_of

NODES = {"a": 2, "b": 2, "c": 1}
MEMBERS = tuple(f"{node}/{chip}" for node, chips in NODES.items() for chip in range(chips))
DEADLINE_S = 30.0
SETTINGS = JobSettings(
    deadline_s=DEADLINE_S, notice_s=45.0, keep_memory_every=1, chips_may_come=True
)


class World:
    def __init__(
        self,
        start: FirstStart = "initial",
        chips: Mapping[str, int] = NODES,
    ) -> None:
        self.now_s = 100.0
        self.alive: dict[str, int] = {}  # processes, by the generation they were started for
        self.told_to_end: set[tuple[str, int]] = set()
        self.search: SearchPlan | None = None  # not answered yet
        self.plans: dict[int, tuple[str, ...]] = {}  # the members of plans found, by search
        self.ready: set[tuple[int, str]] = set()
        self.switch_to: dict[int, int] = {}  # as the members that train were told
        self.training: PlannedGeneration | None = None  # the newest one that got its state
        self.stopped = False
        self.ending = 0  # number of the generation of which some have come to the end of the job
        self.step = 0
        self.number = 0  # of the newest generation
        self.silent: tuple[str, ...] = ()  # members for whom others wait in vain
        self.starts = 0  # in a row, neither followed by a step nor explained by a lost chip
        self.told: list[str] = []
        self.asked: list[Command] = []
        roster = Roster.of(MEMBERS, chips)
        self._follow(begin(SETTINGS, roster, start, MEMBERS, 0, self.now_s))

    # ---------------------------------------------------------------- what a test makes happen

    def hear(self, event: Event) -> None:
        """The leader hears of an event; what it decides is checked and carried out."""
        before = self.state
        decision = react(before, event)
        assert react(before, event) == decision, "the same state and event decide alike"
        if isinstance(before.phase, Over):
            assert decision == (before, ()), "an outcome is final"
        elif _is_loss(before, event):
            assert isinstance(decision[0].phase, Fencing | Over), "a loss leads to a fence"
        elif isinstance(before.phase, Fencing):
            may_follow = Fencing | Over | Planning | Awaiting
            assert isinstance(decision[0].phase, may_follow), "a fence is not left for a generation"
        if _lost(decision[0]) - _lost(before):
            self.starts = 0
        self._follow(decision)

    def tick(self, passed_s: float = 0.1) -> None:
        self.now_s += passed_s
        self.happens(TimePassed)
        before = self.state
        self.hear(Tick(at_s=self.now_s))
        if _is_late(before, self.now_s):
            after = self.state
            assert (after.phase, after.roster) != (before.phase, before.roster), "no wait goes on"

    def happens(self, event: type[Any], **fields: Any) -> None:
        self.hear(event(at_s=self.now_s, **fields))

    def offer(self, **chips: int) -> None:
        self.happens(ChipsOffered, chips=chips)

    def notice(self, member: str) -> None:
        self.happens(NoticeGiven, member=member)

    def die(self, member: str, code: int = -9, failure: Failure | None = None) -> None:
        """A process ends by itself, or because of others."""
        number = self.alive.pop(member)
        killed = (member, number) in self.told_to_end
        silent = member in self.silent
        self.happens(
            MemberEnded,
            member=member,
            number=number,
            code=code,
            killed=killed,
            failure=failure,
            silent=silent,
        )

    def lose_node(self, node: str) -> None:
        self._end_with_node(node)
        self.happens(NodeLost, node=node, silent_s=31.0)

    def agents_kill(self) -> None:
        """Agents end whom they were told to end."""
        for member, number in list(self.alive.items()):
            if (member, number) in self.told_to_end:
                self.die(member)

    def find_plan(self, members: Iterable[str] | None = None) -> None:
        """The planner uses some of the chips that it was asked for; None: it finds no plan.

        A search that was not asked for is not answered.
        """
        if (asked := self.search) is None:
            return
        self.search = None
        used = tuple(member for member in asked.members if member in (members or ()))
        if not used:
            self.happens(PlanFailed, search=asked.search, why="no plan for the chips")
            return
        self.plans[asked.search] = used
        self.happens(PlanFound, search=asked.search, members=used)

    def joiners_open_chips(self) -> None:
        if isinstance(phase := self.state.phase, Joining):
            for member in phase.next.joiners(phase.current):
                if self.alive.get(member) == phase.next.number:
                    self.open_chip(phase.next.number, member)

    def open_chip(self, number: int, member: str) -> None:
        self.ready.add((number, member))
        self.happens(MemberReady, number=number, member=member)

    def begin_switch(self) -> None:
        """The members that train set their last step, if they were told of another generation."""
        if self.training and self.training.number in self.switch_to:
            self.happens(SwitchBegun, number=self.training.number)

    def read(self) -> None:
        if following := self.state.next:
            self.happens(ReadingBegun, number=following.number)

    def get_state(self) -> None:
        """A generation all of whose members are alive gets its state, and may train."""
        following = self.state.next
        if following is None or not self._all_alive(following):
            return
        if isinstance(self.state.phase, Joining | Dropping):
            return  # nobody was told to switch
        self.training = following
        account = Account(step=self.step, seconds=1.0)
        self.happens(StateReady, number=following.number, account=account)

    def train(self) -> None:
        current = self.state.current
        if current and current == self.training and self._all_alive(current):
            self.step += 1
            self.starts = 0
            progress = Progress(step=self.step, loss=1.0, tokens_per_s=1.0, step_s=1.0)
            self.happens(StepDone, number=current.number, progress=progress)

    def end_in_order(self, members: Collection[str] = MEMBERS) -> None:
        """Some of those that train come to the end of the job, or to the stop; so will others."""
        current = self.training
        if current and (self._all_alive(current) or self.ending == current.number):
            self.ending = current.number
            for member in current.members:
                if member in members and member in self.alive:
                    self.die(member, code=0)

    def leavers_end(self) -> None:
        """Members that a switch has left out end in order."""
        if isinstance(phase := self.state.phase, Running):
            for member in set(self.alive) - set(phase.current.members):
                self.die(member, code=0)

    def stop(self) -> None:
        self.happens(StopRequested, verdict=JobOutcome(130))

    # ---------------------------------------------------------------- what follows

    @property
    def outcome(self) -> JobOutcome | None:
        return self.state.phase.outcome if isinstance(self.state.phase, Over) else None

    def help(self) -> None:
        """All whom the leader waits for do their part; nothing is lost."""
        self.agents_kill()
        if self.search:
            self.find_plan(self.search.members)
        self.joiners_open_chips()
        self.begin_switch()
        self.get_state()
        self.leavers_end()
        self.train()
        if self.stopped or (self.training and self.ending == self.training.number):
            self.end_in_order()

    def _all_alive(self, generation: PlannedGeneration) -> bool:
        return self.alive.keys() >= set(generation.members)

    def _end_with_node(self, node: str) -> None:
        """The processes of a lost node ended with its lease, and nobody could say so."""
        for member in [m for m in self.alive if node_of(m) == node]:
            del self.alive[member]

    # ---------------------------------------------------------------- decisions

    def _follow(self, decision: Decision) -> None:
        self.state, commands = decision
        for command in commands:
            self.asked.append(command)
            self._carry_out(command)
        self._check()

    def _carry_out(self, command: Command) -> None:
        match command:
            case SearchPlan():
                assert not self.stopped, "nothing new begins after a stop"
                assert set(command.members) <= set(MEMBERS)
                assert set(command.nodes) <= set(map(node_of, command.members))
                self.search = command
            case StartMembers(generation=generation):
                self._start(generation)
            case KillMembers(members=members):
                for member, number in members:
                    assert number <= self.number and member in MEMBERS, "a process is known"
                    self.told_to_end.add((member, number))
            case AnnounceSwitch(number=number, follower=follower):
                self._announce_switch(number, follower)
            case AnnounceStop():
                assert not self.stopped, "a stop is told once"
                self.stopped = True
            case NameSilentMembers(generations=generations):
                known = {m for each in generations for m in (*each.members, *each.leavers)}
                silent = tuple(member for member in self.silent if member in known)
                self.happens(SilentMembersNamed, members=silent)
            case Tell(sentence=sentence):
                self.told.append(sentence)

    def _start(self, generation: PlannedGeneration) -> None:
        live, current = self.state.live, self.state.current
        fresh = [member for member in generation.members if live[member] == generation.number]
        joiners = generation.joiners(current) if current else generation.members
        assert set(fresh) == set(joiners), "agents start whom the leader takes to be started"
        assert generation.number == self.number + 1, "no generation is started twice"
        self.number = generation.number
        assert generation.members == self.plans.get(self.state.searches), "a plan has the members"
        assert not set(fresh) & self.alive.keys(), "no member has two processes"
        if generation.start == "switch":
            assert current and generation.before == current.number
            assert not self.stopped, "nothing new begins after a stop"
            kept = set(generation.members) - set(fresh)
            assert kept <= set(current.members), "who goes on was training"
        else:
            assert not self.alive, "no member is left of an earlier generation"
            assert set(fresh) == set(generation.members)
            self.starts += 1
            assert self.starts <= TRIES, "tries are bounded"
        self.alive.update(dict.fromkeys(fresh, generation.number))

    def _announce_switch(self, number: int, follower: int) -> None:
        phase = self.state.phase
        assert isinstance(phase, Switching)
        assert (phase.current.number, phase.next.number) == (number, follower)
        joiners = phase.next.joiners(phase.current)
        assert all((follower, member) in self.ready for member in joiners), "joiners are ready"
        assert not self.stopped
        assert number not in self.switch_to, "a generation is told to switch once"
        self.switch_to[number] = follower

    def _check(self) -> None:
        """What holds after every decision."""
        state, phase = self.state, self.state.phase
        if not isinstance(phase, Over):
            assert state.live == self.alive, "the leader knows who is alive"
        doomed = {
            member for member, number in state.live.items() if (member, number) in self.told_to_end
        }
        match phase:
            case Planning(answer=None):
                assert self.search and self.search.search == phase.search, "a plan is searched"
            case Planning():
                pass  # a decision is due at the next tick, or a member that lingers is to end
            case Running(current=current):
                owed = set(state.live) | state.finished
                assert owed >= set(current.members), "who trains is alive, or ended in order"
            case Fencing():
                assert doomed == set(state.live), "a fence spares nobody"
            case Dropping(current=current, next=following):
                assert doomed >= set(following.joiners(current)) & state.live.keys()
            case Over(outcome=outcome):
                may_live = (outcome.sentence or "").endswith("cannot be ended")
                assert may_live or not self.alive, "nobody is left when the job is over"
            case Joining() | Switching() | Starting() | Awaiting():
                pass  # these have a deadline alone


def _is_late(state: JobState, now_s: float) -> bool:
    """Whether what the leader waits for should have come: something else must follow then."""
    match state.phase:
        case Starting(deadline_s=deadline_s, reading=reading):
            return now_s > deadline_s + (READ_S if reading else 0)
        case (
            Planning(deadline_s=deadline_s, answer=None)
            | Joining(deadline_s=deadline_s)
            | Switching(deadline_s=deadline_s)
            | Dropping(deadline_s=deadline_s)
            | Fencing(deadline_s=deadline_s)
            | Awaiting(deadline_s=deadline_s)
        ):
            return now_s > deadline_s
        case Running():
            return state.stop_by_s is not None and now_s > state.stop_by_s
    return False


def _lost(state: JobState) -> set[str]:
    return {member for member, what in state.roster.standing.items() if what == "lost"}


def _is_loss(state: JobState, event: Event) -> bool:
    """Whether an event is the loss of a chip without which training cannot go on."""
    match event:
        case MemberEnded():
            known = state.live.get(event.member) == event.number
            return known and event.lost and event.member in state.training
        case NodeLost():
            there = state.roster.there() & state.training
            return any(node_of(member) == event.node for member in there)
        case TimePassed():
            return not state.training.isdisjoint(state.roster.overdue(event.at_s))
    return False
