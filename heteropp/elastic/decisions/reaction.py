"""One event being worked through: the state so far, and the commands; what several events share."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from heteropp.elastic.decisions.commands import (
    AnnounceStop,
    Command,
    ForgetMemory,
    KillMembers,
    PlannedGeneration,
    RehearseSearch,
    SearchPlan,
    Tell,
)
from heteropp.elastic.decisions.events import Happened
from heteropp.elastic.decisions.phases import Dropping, Fencing, Joining, Over, Phase, Planning
from heteropp.elastic.decisions.roster import Roster
from heteropp.elastic.decisions.state import JobState
from heteropp.elastic.messages import GRACE_S, KILLED_S, JobOutcome, node_of

SEARCH_S = 600.0  # for a plan
STOP_S = 600.0  # for the members to save when they are told to stop


class Reaction:
    def __init__(self, state: JobState, event: Happened) -> None:
        self.state = state
        self.now_s = event.at_s
        self.commands: list[Command] = []

    def ask(self, command: Command) -> None:
        self.commands.append(command)

    def enter(self, phase: Phase) -> None:
        self.state = replace(self.state, phase=phase)

    def late(self, deadline_s: float) -> bool:
        return self.now_s > deadline_s

    # ---------------------------------------------------------------- sentences

    def tell(self, sentence: str) -> None:
        self.ask(Tell(sentence=sentence))

    def note(self, what: str) -> None:
        """Notes a cause of the next change, and tells the user."""
        self.state = replace(self.state, history=self.state.history.because(what))
        self.tell(what)

    # ---------------------------------------------------------------- losses

    def lose(self, member: str, how: str) -> None:
        """A member's chip has gone at once; where training needs it, all members are fenced."""
        self.state = replace(self.state, roster=self.state.roster.lose(member))
        self.note(f"{member} {how}")
        if self.state.joins(member):
            return
        self.state = replace(self.state, cost_a_chip=True)
        if member in self.state.training:
            self.fence()

    def lose_node(self, node: str, silent_s: float) -> None:
        """Counts all members of a node as lost, whose silent agent cannot report that they ended.

        They have: the node's lease runs out before it is silent for so long. An agent that goes on
        after it, and starts members of a generation that it missed, finds that they are to end.
        """
        self.kill([member for member in self.state.live if node_of(member) == node])
        how = f"is lost: its node has not answered for {silent_s:.0f} s, and its lease is over"
        for member in self.state.roster.standing:
            if node_of(member) == node:
                live = {m: number for m, number in self.state.live.items() if m != member}
                self.state = replace(self.state, live=live)
                if member in self.state.roster.there():
                    self.lose(member, how)

    def forget_empty_nodes(self) -> None:
        """Nodes that lost all of their chips lose what they kept in host memory, too."""
        if empty := self.state.roster.empty_nodes():
            self.ask(ForgetMemory(nodes=tuple(sorted(empty))))

    # ---------------------------------------------------------------- the end of members

    def kill(self, members: Collection[str]) -> None:
        """Asks for the end of those of the members that are alive."""
        live = tuple((m, number) for m, number in self.state.live.items() if m in members)
        if live:
            self.ask(KillMembers(members=live))

    def fence(self) -> None:
        """Ends every member's process, so that none is left when others take over its work."""
        state = self.state
        if isinstance(state.phase, Fencing | Over):
            return
        self.state = replace(state, history=state.history.stand_still())
        self.kill(state.live.keys())
        deadline_s = self.now_s + GRACE_S + KILLED_S
        self.enter(Fencing(current=state.current, next=state.next, deadline_s=deadline_s))

    def drop(self, joining: Joining) -> None:
        """Gives up a generation that nobody was told to switch to.

        A joiner whose node is cut off ends with its lease.
        """
        self.kill(joining.next.joiners(joining.current))
        deadline_s = self.now_s + GRACE_S + KILLED_S + self.state.settings.deadline_s
        self.enter(Dropping(current=joining.current, next=joining.next, deadline_s=deadline_s))

    # ---------------------------------------------------------------- the end of the job

    def stop(self, verdict: JobOutcome) -> None:
        """Ends the job after the step, which is saved; a second request changes nothing."""
        if self.state.stop_by_s is None:
            self.state = replace(self.state, stop_by_s=self.now_s + STOP_S, verdict=verdict)
            self.ask(AnnounceStop())

    def give_up(self, sentence: str) -> None:
        """Ends the job as it cannot go on; the first reason is the one that is told."""
        verdict = self.state.verdict
        if verdict is None or verdict.exit_code != 1:
            self.state = replace(self.state, verdict=JobOutcome(1, sentence))
        self.fence()

    def end(self, verdict: JobOutcome) -> None:
        """Ends the job with the verdict it already has, or else with this one."""
        self.state = replace(self.state, verdict=self.state.verdict or verdict)
        self.fence()

    def finish(self, outcome: JobOutcome) -> None:
        """The job is over: no member is left, or it cannot be ended."""
        self.enter(Over(outcome=outcome, current=self.state.current))

    # ---------------------------------------------------------------- plans

    def plan(self, current: PlannedGeneration | None) -> None:
        """Begins the search of a plan for the chips that are to train.

        current: the generation that trains meanwhile; None: the plan is for a start or a recovery.
        """
        search = self.state.searches + 1
        planning = planning_for(self.state.roster, current, search, self.now_s)
        self.state = replace(self.state, phase=planning, searches=search)
        self.ask(search_for(self.state, planning))

    def rehearse(self) -> None:
        """Prepares for the next search, while nothing calls for one."""
        roster, up = self.state.roster, self.state.roster.up()
        members = tuple(member for member in roster.standing if member in up)
        self.ask(RehearseSearch(members=members, before=self.state.planned_for))


def planning_for(
    roster: Roster, current: PlannedGeneration | None, search: int, now_s: float
) -> Planning:
    """A plan may use the chips that are up; for a start, noticed ones too: they may hold state."""
    return Planning(
        current=current,
        search=search,
        chips=roster.up() if current else roster.there(),
        deadline_s=now_s + SEARCH_S,
    )


def search_for(state: JobState, planning: Planning) -> SearchPlan:
    """The plan of a recovery uses all nodes that trained last: any may have a layer's newest
    snapshot. A better plan that leaves some of them out follows by a switch.
    """
    recovers = state.start == "recover" and not planning.current
    keepers = set(map(node_of, state.planned_for)) if recovers else set()
    if state.awaited:
        keepers |= state.awaited.keepers
    return SearchPlan(
        search=planning.search,
        members=tuple(member for member in state.roster.standing if member in planning.chips),
        before=state.planned_for,
        nodes=tuple(sorted(keepers.intersection(map(node_of, planning.chips)))),
        may_keep=planning.current is None,  # the first plan, or one whose members failed
    )
