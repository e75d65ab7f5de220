"""Leads an elastic job: finds out what happens, has it decided, and does what is to be done.

`heteropp.elastic.decisions` decides. What it is told comes from the job's store, the agents'
heartbeats, the file that says which chips there are, and the search of plans. `turn` is called many
times a second and never waits.
"""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import torch.distributed as dist

from heteropp.description.cluster import Cluster
from heteropp.description.cluster_writer import write_cluster
from heteropp.description.files import write_json
from heteropp.description.plan import PlanError, write_plan
from heteropp.elastic.decisions.commands import (
    AnnounceStop,
    AnnounceSwitch,
    Command,
    FirstStart,
    ForgetMemory,
    KillMembers,
    NameSilentMembers,
    PlannedGeneration,
    RecordChange,
    RehearseSearch,
    RemoveGeneration,
    SearchPlan,
    StartMembers,
    Tell,
)
from heteropp.elastic.decisions.events import (
    ChipsOffered,
    Event,
    MemberReady,
    NodeLost,
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
from heteropp.elastic.decisions.machine import Decision, begin, react
from heteropp.elastic.decisions.phases import Joining, Over, Starting, Switching
from heteropp.elastic.decisions.roster import Roster
from heteropp.elastic.decisions.state import JobSettings
from heteropp.elastic.job import Board, Generation, Job
from heteropp.elastic.launcher.availability import Availability
from heteropp.elastic.launcher.change import Change, changed
from heteropp.elastic.launcher.members import Members
from heteropp.elastic.launcher.plan_search import Planned, rehearse_beside, search_beside
from heteropp.elastic.launcher.pulse import Pulse
from heteropp.elastic.messages import Account, JobOutcome, Progress
from heteropp.search.planner import SearchError


class Leader:
    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        roster: Roster,
        store: dist.Store,
        pulse: Pulse,
        availability: Availability | None,
        notice_s: float,
        tell: Callable[[str], None],
        node_gone: Callable[[str], None] | None,
        first: FirstStart,
        planned_for: tuple[str, ...],
    ) -> None:
        """`cluster`: of all chips there may ever be; roster: of its members.

        first, planned_for: of the first plan, how it starts and its members by rank. `tell` takes
        sentences for the user, `node_gone` nodes of which no chip is left.
        """
        self.job, self.cluster = job, cluster
        self.board, self.members = Board(store), Members(store)
        self.pulse, self.availability = pulse, availability
        self.tell, self.node_gone = tell, node_gone
        self.generations = job.run.output / "generations"  # the folder of their folders
        self.plan = job.run.plan  # of the generation that trains, or trained last
        self.search: tuple[int, Future[Planned]] | None = None  # until its answer is heard
        self.found: Planned | None = None  # what was found last
        self.changes: list[Change] = []  # one for each generation that trained
        settings = JobSettings(
            deadline_s=job.run.deadline_s,
            notice_s=notice_s,
            keep_memory_every=job.keep_memory_every,
            chips_may_come=availability is not None,
        )
        number = max((int(path.name) for path in self.generations.glob("[0-9]*")), default=0)
        self._follow(begin(settings, roster, first, planned_for, number, time.monotonic()))

    @property
    def outcome(self) -> JobOutcome | None:
        """How the job ended; None: it goes on."""
        return self.state.phase.outcome if isinstance(self.state.phase, Over) else None

    def turn(self) -> None:
        """Hears what is new and does what follows; `outcome` says when there is no more to do."""
        if self.availability and (warning := self.availability.take_warning()):
            self.tell(f"warning: {warning}; going on with what it said before")
        for event in self._news():
            self._hear(event)
        self._hear(Tick(at_s=time.monotonic()))

    def stop(self, verdict: JobOutcome) -> None:
        """Ends the job after the step, which is saved."""
        self._hear(StopRequested(at_s=time.monotonic(), verdict=verdict))

    # ---------------------------------------------------------------- what is new

    def _hear(self, event: Event) -> None:
        self._follow(react(self.state, event))

    def _follow(self, decision: Decision) -> None:
        """Takes over the new state and carries out the commands, and those that answers lead to."""
        self.state, commands = decision
        left = deque(commands)
        while left:
            answer = self._carry_out(left.popleft())
            if answer is not None:
                self.state, commands = react(self.state, answer)
                left.extend(commands)

    def _news(self) -> Iterator[Event]:
        """Yields what is new; each event has been heard before the next one is looked for."""
        if self.availability:
            yield ChipsOffered(at_s=time.monotonic(), chips=self.availability.chips)
        yield from self.members.noticed(self.state.live)
        generations = [each for each in (self.state.current, self.state.next) if each]
        yield from self.members.ended(self.state.live, generations)
        yield TimePassed(at_s=time.monotonic())
        if current := self.state.current:
            number = current.number
            if progress := self.board.heard(Progress, "progress", number):
                yield StepDone(at_s=time.monotonic(), number=number, progress=progress)
        for node in self.pulse.turn():
            silent_s = self.pulse.silent_s(node)
            yield NodeLost(at_s=time.monotonic(), node=node, silent_s=silent_s)
        yield from self._news_of_next()
        if self.search and self.search[1].done():
            yield self._plan_found(*self.search)

    def _news_of_next(self) -> Iterator[Event]:
        """Yields what the generation that is being started has come to."""
        phase, now_s = self.state.phase, time.monotonic()
        match phase:
            case Joining(next=following):
                for member in following.joiners(phase.current):
                    if self.board.heard(str, "ready", following.number, member) is not None:
                        yield MemberReady(at_s=now_s, number=following.number, member=member)
            case Switching(current=current, next=following):
                if account := self.board.heard(Account, "switched", following.number):
                    yield StateReady(at_s=now_s, number=following.number, account=account)
                if self.board.heard(int, "switch-at", current.number) is not None:
                    yield SwitchBegun(at_s=now_s, number=current.number)
            case Starting(next=following):
                if account := self.board.heard(Account, "recovered", following.number):
                    yield StateReady(at_s=now_s, number=following.number, account=account)
                if self.board.heard(str, "reading", following.number) is not None:
                    yield ReadingBegun(at_s=now_s, number=following.number)

    def _plan_found(self, search: int, future: Future[Planned]) -> Event:
        self.search, now_s = None, time.monotonic()
        try:
            self.found = future.result()
        except (PlanError, SearchError) as error:
            return PlanFailed(at_s=now_s, search=search, why=str(error))
        return PlanFound(at_s=now_s, search=search, members=self.found.cluster.members)

    # ---------------------------------------------------------------- what is to be done

    def _carry_out(self, command: Command) -> Event | None:
        """Does what is asked for, and returns the answer where there is one at once."""
        match command:
            case SearchPlan():
                self.search = command.search, self._begin_search(command)
            case StartMembers(generation=generation):
                self._start(generation)
            case KillMembers():
                self.members.kill(command)
            case AnnounceSwitch(number=number, follower=follower):
                self.board.say(follower, "next", number)
            case AnnounceStop():
                self.board.say("", "stop")
            case RemoveGeneration(number=number):
                shutil.rmtree(self._folder(number), ignore_errors=True)
            case RecordChange():
                self._record(command)
            case RehearseSearch(members=members, before=before):
                if members:
                    cluster, first = self._cluster_of(members), self.job.run.plan
                    rehearse_beside(cluster, self.plan, before, self._documents_apart, first)
            case ForgetMemory(nodes=nodes):
                self._forget_memory(nodes)
            case NameSilentMembers(generations=generations):
                silent = self.members.silent(generations)
                return SilentMembersNamed(at_s=time.monotonic(), members=silent)
            case Tell(sentence=sentence):
                self.tell(sentence)
        return None

    def _begin_search(self, command: SearchPlan) -> Future[Planned]:
        known: Future[Planned] = Future()
        if not command.members:
            known.set_exception(PlanError("no chip is left"))
            return known
        cluster = self._cluster_of(command.members)
        if command.may_keep and cluster.members == command.before:
            known.set_result(Planned(cluster, self.plan, 0))
            return known
        first, apart = self.job.run.plan, self._documents_apart
        return search_beside(cluster, self.plan, command.before, command.nodes, apart, first)

    @property
    def _documents_apart(self) -> bool:
        return self.job.run.attention_within == "document"

    def _start(self, planned: PlannedGeneration) -> None:
        assert self.found is not None  # or else there would be no generation
        current = self.state.current
        generation = Generation(
            number=planned.number,
            folder=self._folder(planned.number),
            members=planned.members,
            joiners=planned.joiners(current) if current else planned.members,
            start=planned.start,
            before=planned.before,
            leavers=planned.leavers,
            cause=planned.cause,
        )
        write_cluster(self.found.cluster, generation.cluster)
        write_plan(self.found.plan, generation.plan)
        self.members.start(generation)

    def _record(self, command: RecordChange) -> None:
        """Keeps a change, and the plan that trains from now on. Raises FileError."""
        assert self.found is not None
        before = self.changes[-1] if self.changes else None
        change = changed(command, self.found, before, self.plan)
        self.changes.append(change)
        write_json(self._folder(change.number) / "change.json", change)
        self.plan = self.found.plan

    def _forget_memory(self, nodes: tuple[str, ...]) -> None:
        if self.node_gone:
            for node in nodes:
                self.node_gone(node)

    def _folder(self, number: int) -> Path:
        return self.generations / f"{number:04d}"

    def _cluster_of(self, members: tuple[str, ...]) -> Cluster:
        return self.cluster.kept(map(self.cluster.rank, members))
