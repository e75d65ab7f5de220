"""Decides which generation trains: hears what became of the chips, and acts on it.

`turn` is called many times a second and never waits. What there is decides what is done: whenever
the chips that are up are not those of the generation that runs, another one is prepared. Phases:

    planning   a plan for the chips that are up is searched, in a thread
    joining    a switch: members that are new open their chips, while the steps run
    switching  the generation that runs was told to; it becomes the new one after a step
    starting   a start or a recovery: all members are new
    running    the chips that are up train
    dropping   members started for a cancelled generation are killed
    fencing    all members are killed, as one was lost or failed
    awaiting   a recovery lacks snapshots that a node without chips may have: one may come back

A loss leads from everywhere to fencing, from there to planning and to a recovery. As the newest
snapshot of a layer may be with any node that trained last, the plan of a recovery uses all of
those; a better one that leaves some out follows by a switch.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Literal

import torch.distributed as dist

from heteropp.description.cluster import write_cluster
from heteropp.description.plan import PlanError, write_plan
from heteropp.elastic.job import Board, Generation, Job
from heteropp.elastic.launcher.availability import Availability
from heteropp.elastic.launcher.awaited import Awaited
from heteropp.elastic.launcher.history import UNEXPLAINED, History
from heteropp.elastic.launcher.members import End, Members
from heteropp.elastic.launcher.plan_search import Planned, rehearse_beside, search_beside
from heteropp.elastic.launcher.pulse import Pulse
from heteropp.elastic.launcher.roster import Roster
from heteropp.elastic.messages import GRACE_S, KILLED_S, Account, JobOutcome, Progress, node_of
from heteropp.search.planner import SearchError

TRIES = 3  # in a row without a step, but for those that cost a chip
SEARCH_S = 600.0  # for a plan
STOP_S = 600.0  # for the members to save when they are told to stop
START_S = 60.0  # for members to come up, besides the deadline: many at once on a busy host
READ_S = 3600.0  # for a recovery's members to read the state
LINGER_S = 30.0  # for members that left a generation to end

Phase = Literal[
    "planning", "joining", "switching", "starting", "running", "dropping", "fencing", "awaiting"
]
Start = Literal["initial", "recover"]


class Leader:
    def __init__(
        self,
        job: Job,
        roster: Roster,
        store: dist.Store,
        pulse: Pulse,
        availability: Availability | None,
        notice_s: float,
        tell: Callable[[str], None],
        node_gone: Callable[[str], None] | None,
        first: Start,
        planned_for: tuple[str, ...],
    ) -> None:
        """first, planned_for: of the first plan, how it starts and its members by rank.

        `tell` takes sentences for the user, `node_gone` nodes of which no chip is left.
        """
        self.job, self.roster, self.board = job, roster, Board(store)
        self.pulse, self.availability, self.notice_s = pulse, availability, notice_s
        self.tell, self.node_gone = tell, node_gone
        self.history = History(tell)
        self.members = Members(store)
        self.start: Start = first  # of a generation that follows on none
        self.plan = job.run.plan  # of the generation that runs, or ran last
        self.planned_for = planned_for  # its members by rank
        self.running: Generation | None = None
        self.next: Generation | None = None
        self.found: Planned | None = None  # of the next
        self.folder = job.run.output / "generations"
        self.number = max((int(path.name) for path in self.folder.glob("[0-9]*")), default=0)
        self.finished: set[str] = set()  # members that ended in order
        self.refused: set[str] | None = None  # chips for which there is no plan
        self.tries = 0
        self.aim: set[str] = set()  # chips that a plan is searched for
        # chips that the running generation's plan is the best one for; None: that is to be seen
        self.served: set[str] | None = None
        self.search: Future[Planned] | None = None
        self.phase: Phase
        self.deadline_s = 0.0  # monotonic, of the phase
        self.linger_until_s = 0.0  # monotonic
        self.stop_by_s: float | None = None  # monotonic; None: not told to stop
        self.verdict: JobOutcome | None = None  # once all members have ended
        self.outcome: JobOutcome | None = None
        self.cost_a_chip = False  # what happened since the last step
        self.awaited: Awaited | None = None  # what the last recovery lacked
        self._plan()

    def turn(self) -> None:
        """Hears what is new and does what follows; `outcome` says when there is no more to do."""
        self._hear_availability()
        self._hear_members()
        for node in self.pulse.turn():
            self._lose_node(node)
        if self.stop_by_s is not None:
            self._stopping()
        if self.outcome is None:
            getattr(self, f"_{self.phase}")()

    def stop(self, verdict: JobOutcome) -> None:
        """Ends the job after the step, which is saved."""
        if self.stop_by_s is None:
            self.stop_by_s, self.verdict = time.monotonic() + STOP_S, verdict
            self.board.say("", "stop")

    # ---------------------------------------------------------------- what is new

    def _hear_availability(self) -> None:
        if self.availability is None:
            return
        if warning := self.availability.take_warning():
            self.tell(f"warning: {warning}; going on with what it said before")
        going, coming = self.roster.offer(self.availability.chips, self.notice_s)
        if going:
            self.history.note(f"{', '.join(going)} will go")
        if coming:
            self.history.note(f"{', '.join(coming)} came")

    def _hear_members(self) -> None:
        for member in self.members.live:
            told = self.board.take(str, "notice", member) is not None
            if told and self.roster.notice(member, self.notice_s):
                self.history.note(f"{member} will go")
        for end in self.members.ended():
            self._hear_end(end)
        for member in self.roster.overdue():
            if member in self._training():
                self._lose(member, f"had {self.notice_s:g} s to go")
            else:
                self.roster.leave(member)
        if self.running is None:
            return
        if self.history.hear(self.board.heard(Progress, "progress", self.running.number)):
            self.tries = 0

    def _hear_end(self, end: End) -> None:
        if end.code == 0:
            self.finished.add(end.member)
        elif end.member not in self._training() and self.running and not self._joins(end.member):
            pass  # it had left
        elif end.failure and end.failure.kind == "job":
            self._give_up(f"{end.member} {end.failure.what}")
        elif end.failure and end.failure.kind == "lost":
            self._lack(f"{end.member} {end.failure.what}", end.failure.nodes)
        elif end.lost or (self._joins(end.member) and not end.killed):
            silent = end.member in self._silent()
            self._lose(end.member, "did not answer in time" if silent else end.how)
        elif not end.killed:
            if end.failure:  # or else it ended because of another, which is heard, too
                self.history.note(f"{end.member} {end.how}")
            self._fence()

    def _lack(self, what: str, keepers: Collection[str]) -> None:
        """Waits for absent keepers, as no whole step is here; gives up if none can come back."""
        here = self.next.members if self.next else ()
        known = set(keepers) & set(self.roster.nodes)
        awaited = Awaited.of(what, known, map(node_of, here), self.job.run.deadline_s)
        if awaited.nodes and self.availability:
            self.awaited = awaited
            self._fence()
        else:
            self._give_up(what)

    def _lose(self, member: str, how: str) -> None:
        self.roster.lose(member)
        self.history.note(f"{member} {how}")
        if self._joins(member):
            return
        self.cost_a_chip = True
        if member in self._training():
            self._fence()

    def _lose_node(self, node: str) -> None:
        """Counts all members of a node as lost, whose silent agent cannot report that they ended.

        Members that still live cannot reach the store either, and end by themselves.
        """
        silent = f"is lost: its node has not answered for {self.pulse.silent_s(node):.0f} s"
        for member in self.roster.cluster.members:
            if node_of(member) == node:
                self.members.live.pop(member, None)
                if member in self.roster.there():
                    self._lose(member, silent)

    def _silent(self) -> set[str]:
        """Returns the members that the others waited for in vain."""
        generations = [one for one in (self.running, self.next) if one]
        return {m for one in generations if (m := self.members.silent(one))}

    def _joins(self, member: str) -> bool:
        """Whether a member is joining, so that no step needs it yet."""
        return self.phase in ("joining", "dropping") and member not in self._training()

    def _training(self) -> set[str]:
        """The members without whom training cannot go on."""
        here = [self.running]
        if self.phase in ("starting", "switching"):
            here.append(self.next)
        return {member for generation in here if generation for member in generation.members}

    # ---------------------------------------------------------------- phases

    def _stopping(self) -> None:
        """Brings the job to its stop: no other generation follows the running one."""
        assert self.stop_by_s is not None
        if self.phase == "planning" and self.running:
            self.phase = "running"
        elif self.phase == "joining":
            self._drop()
        elif self.running is None or time.monotonic() > self.stop_by_s:
            self._fence()

    def _wait(self, phase: Phase, for_s: float) -> None:
        self.phase, self.deadline_s = phase, time.monotonic() + for_s

    def _late(self) -> bool:
        return time.monotonic() > self.deadline_s

    def _plan(self) -> None:
        """Begins the search of a plan for the chips that are to train."""
        self.aim = self._trainable()
        self.search = self._begin_search()
        self._wait("planning", SEARCH_S)

    def _begin_search(self) -> Future[Planned]:
        if not self.aim:
            none: Future[Planned] = Future()
            none.set_exception(PlanError("no chip is left"))
            return none
        cluster = self.roster.cluster_of(self.aim)
        if cluster.members == self.planned_for and not self.running:
            known: Future[Planned] = Future()  # the first plan, or one whose members failed
            known.set_result(Planned(cluster, self.plan, 0))
            return known
        recovers = self.start == "recover" and not self.running
        keepers = set(map(node_of, self.planned_for)) if recovers else set()
        keepers |= self.awaited.keepers if self.awaited else set()
        nodes = keepers.intersection(cluster.node_names)
        return search_beside(cluster, self.plan, self.planned_for, nodes)

    def _trainable(self) -> set[str]:
        """Returns the members that are up; for a start, noticed ones too: they may hold state."""
        return self.roster.up() if self.running else self.roster.there()

    def _planning(self) -> None:
        if self.running and self._as_it_should_be():
            self.phase = "running"
        elif self.running and self._completed():
            self._end(JobOutcome(0))
        elif self.search and self.search.done():
            if self.aim == self._trainable():
                self._planned()
            else:
                self._plan()
        elif self._late():
            self._no_plan(f"no plan was found in {SEARCH_S:g} s")

    def _planned(self) -> None:
        assert self.search
        lingering = self.members.live.keys() - self._training()
        if lingering & self.aim:  # a chip that went and came back
            self.members.kill(lingering)
            return
        try:
            self.found = self.search.result()
        except (PlanError, SearchError) as error:
            self._no_plan(str(error))
            return
        members = self.found.cluster.members
        before = self.running
        if before and members == before.members:  # none of the chips that changed is of use
            self.served, self.history.causes, self.phase = self.aim, [], "running"
            return
        self.number += 1
        cause = self.history.plan_next()
        self.next = Generation(
            number=self.number,
            folder=self.folder / f"{self.number:04d}",
            members=members,
            start="switch" if before else self.start,
            before=before.number if before else None,
            leavers=tuple(m for m in before.members if m not in members) if before else (),
            cause=cause or self._unexplained(members),
        )
        write_cluster(self.found.cluster, self.next.cluster)
        write_plan(self.found.plan, self.next.plan)
        self.finished -= set(members)
        self.members.start(self.next)
        self._wait("joining" if before else "starting", self._start_s())

    def _start_s(self) -> float:
        """Returns the seconds for a start: more than members wait, so that they say why first."""
        return START_S + self.job.run.deadline_s

    def _unexplained(self, members: tuple[str, ...]) -> str:
        """Why another generation follows, where nothing happened."""
        left = [m for m in self.running.members if m not in members] if self.running else ()
        return f"the best plan is without {', '.join(left)}" if left else UNEXPLAINED

    def _will_go(self) -> list[str]:
        """Returns a sentence for each training member that has had notice, unless it is known."""
        assert self.running
        noticed = [m for m in self.running.members if self.roster.standing[m] == "noticed"]
        return [what for m in noticed if (what := f"{m} will go") not in self.history.causes]

    def _no_plan(self, why: str) -> None:
        if self.running is None:
            self._end(JobOutcome(1, f"{why}; --resume goes on from the snapshots that there are"))
            return
        self.phase = "running"
        if set(self.running.members) <= self.aim:
            self.refused = self.aim
            self.tell(f"{why}; training goes on as it is")
        else:
            self.stop(JobOutcome(1, f"{why}; the last step is saved, --resume goes on from it"))

    def _joining(self) -> None:
        assert self.running and self.next
        joiners = self._joiners()
        said = {m: self.board.heard(str, "ready", self.next.number, m) for m in joiners}
        ready = {member for member in joiners if said[member] is not None}
        if self._completed():
            self._end(JobOutcome(0))
        elif self.aim != self.roster.up():
            self._drop()
        elif ready == joiners:
            self.board.say(self.next.number, "next", self.running.number)
            step_s = self.history.progress.step_s if self.history.progress else 0
            self._wait("switching", self.job.run.deadline_s + 2 * step_s)
        elif self._late():
            for member in joiners - ready:
                self._lose(member, f"did not come up in {self._start_s():g} s")

    def _joiners(self) -> set[str]:
        assert self.running and self.next
        return set(self.next.members) - set(self.running.members)

    def _drop(self) -> None:
        """Gives up a generation that nobody was told to switch to."""
        self.members.kill(self._joiners())
        self._wait("dropping", GRACE_S + KILLED_S)

    def _dropping(self) -> None:
        assert self.next
        if not self._joiners() & self.members.live.keys():
            shutil.rmtree(self.next.folder, ignore_errors=True)
            self.next = None
            self.phase = "running"
        elif self._late():
            self._give_up("a member that was killed does not end")

    def _switching(self) -> None:
        assert self.next
        if account := self.board.heard(Account, "switched", self.next.number):
            self._go_on(account)
        elif self._completed() and not self._switches():
            self._end(JobOutcome(0))
        elif self._late():
            self.history.note("the switch was not done in time")
            self._fence()

    def _switches(self) -> bool:
        """Whether the running generation has begun the switch; all of its members may leave."""
        assert self.running
        return self.board.heard(int, "switch-at", self.running.number) is not None

    def _starting(self) -> None:
        assert self.next
        if account := self.board.heard(Account, "recovered", self.next.number):
            self._go_on(account)
        elif self._late() and not self._reads():
            self.history.note("training did not start in time")
            self._fence()

    def _reads(self) -> bool:
        """Whether members read the state, with time left; those that hang end by themselves."""
        assert self.next
        begun = self.board.heard(str, "reading", self.next.number) is not None
        return begun and time.monotonic() < self.deadline_s + READ_S

    def _go_on(self, account: Account) -> None:
        """A generation has its state, and trains."""
        assert self.next and self.found
        self.history.go_on(self.next, self.found, self.plan, account)
        for member in self.next.leavers:
            if self.roster.standing[member] == "noticed":
                self.roster.leave(member)
        self.linger_until_s = time.monotonic() + LINGER_S
        self.plan, self.planned_for = self.found.plan, self.next.members
        self.running, self.next = self.next, None
        self.served = None if self.running.start == "recover" else self.aim
        self.history.causes += self._will_go()
        self.refused, self.awaited, self.cost_a_chip = None, None, False
        self.phase = "running"
        self._clear_nodes()
        if len(self.history.changes) == 1:
            rehearse_beside(self.roster.cluster_of(self.planned_for), self.plan)

    def _running(self) -> None:
        assert self.running
        if self._completed():
            self._end(JobOutcome(0))
        elif not self._as_it_should_be() and self.stop_by_s is None:
            self._plan()
        elif time.monotonic() > self.linger_until_s:
            self.members.kill(self.members.live.keys() - set(self.running.members))

    def _as_it_should_be(self) -> bool:
        assert self.running
        return self.roster.up() in (self.refused, self.served)

    def _completed(self) -> bool:
        """Whether the training has come to its end."""
        return self.running is not None and self.finished >= set(self.running.members)

    def _fence(self) -> None:
        """Ends every member's process, so that none is left when others take over its work."""
        if self.phase == "fencing":
            return
        self.history.stand_still()
        self.members.kill(list(self.members.live))
        self._wait("fencing", GRACE_S + KILLED_S)

    def _fencing(self) -> None:
        if self.members.live and self._late():
            for node in self.pulse.lose_late():  # its members may have died with it
                self._lose_node(node)
            if left := ", ".join(self.members.live):
                self.outcome = JobOutcome(1, f"{left} cannot be ended")
        if self.members.live:
            return
        for member in self._silent():
            if self.roster.standing[member] != "lost":  # on another machine
                self._lose(member, "did not answer in time")
        self._clear_nodes()
        if self.verdict:
            self.outcome = self.verdict
            return
        self.tries = 0 if self.cost_a_chip else self.tries + 1
        self.cost_a_chip = False
        if self.tries == TRIES:
            why = self.history.last_cause()
            self.outcome = JobOutcome(1, f"{why}; {TRIES} times in a row without a step")
            return
        if self.history.is_kept(self.job.keep_memory_every):
            self.start = "recover"
        self.running = self.next = None
        if self.awaited and not self.awaited.came_back(self.roster):
            self.history.note(self.awaited.sentence)
            self._wait("awaiting", self.awaited.wait_s)
        else:
            self._plan()

    def _awaiting(self) -> None:
        assert self.awaited
        if self.awaited.came_back(self.roster):
            self._plan()
        elif self._late():
            self.outcome = JobOutcome(1, self.awaited.in_vain)

    def _give_up(self, sentence: str) -> None:
        """Ends the job as it cannot go on."""
        if self.verdict is None or self.verdict.exit_code != 1:
            self.verdict = JobOutcome(1, sentence)
        self._fence()

    def _end(self, verdict: JobOutcome) -> None:
        """Ends the job with the verdict it already has, or else with this one."""
        self.verdict = self.verdict or verdict
        self._fence()

    def _clear_nodes(self) -> None:
        if self.node_gone:
            for node in self.roster.empty_nodes():
                self.node_gone(node)
