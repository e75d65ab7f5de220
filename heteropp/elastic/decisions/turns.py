"""What is decided when all news have been heard, phase by phase."""

from __future__ import annotations

from dataclasses import replace

from heteropp.elastic.decisions.commands import (
    AnnounceSwitch,
    PlannedGeneration,
    RecordChange,
    RemoveGeneration,
    StartMembers,
)
from heteropp.elastic.decisions.events import PlanFailed
from heteropp.elastic.decisions.fences import decide_awaiting, decide_fencing
from heteropp.elastic.decisions.history import UNEXPLAINED
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
from heteropp.elastic.decisions.reaction import SEARCH_S, Reaction
from heteropp.elastic.decisions.state import JobState
from heteropp.elastic.messages import Account, JobOutcome

START_S = 60.0  # for members to come up, besides the deadline: many at once on a busy host
READ_S = 3600.0  # for a recovery's members to read the state
LINGER_S = 30.0  # for members that left a generation to end


def decide(reaction: Reaction) -> None:
    """Does what the time and the news of this turn call for."""
    if reaction.state.stop_by_s is not None:
        _bring_to_stop(reaction, reaction.state.stop_by_s)
    match reaction.state.phase:
        case Planning() as phase:
            _decide_planning(reaction, phase)
        case Joining() as phase:
            _decide_joining(reaction, phase)
        case Switching() as phase:
            _decide_switching(reaction, phase)
        case Starting() as phase:
            _decide_starting(reaction, phase)
        case Running() as phase:
            _decide_running(reaction, phase)
        case Dropping() as phase:
            _decide_dropping(reaction, phase)
        case Fencing() as phase:
            decide_fencing(reaction, phase)
        case Awaiting() as phase:
            decide_awaiting(reaction, phase)
        case Over():
            pass


def _bring_to_stop(reaction: Reaction, stop_by_s: float) -> None:
    """Brings the job to its stop: no other generation follows the one that trains."""
    match reaction.state.phase:
        case Planning(current=PlannedGeneration() as current):
            reaction.enter(Running(current=current))
        case Joining() as phase:
            reaction.drop(phase)
        case _:
            if reaction.state.current is None or reaction.late(stop_by_s):
                reaction.fence()


# ---------------------------------------------------------------- a plan


def _decide_planning(reaction: Reaction, phase: Planning) -> None:
    state = reaction.state
    if phase.current and state.as_it_should_be:
        reaction.enter(Running(current=phase.current))
    elif phase.current and state.completed:
        reaction.end(JobOutcome(0))
    elif phase.current and not state.finished.isdisjoint(phase.current.members):
        pass  # some have come to the end of the training, and so will the others
    elif phase.answer is None:
        if reaction.late(phase.deadline_s):
            _go_on_without(reaction, phase, f"no plan was found in {SEARCH_S:g} s")
    elif phase.chips != state.trainable:
        reaction.plan(phase.current)
    elif (lingering := state.live.keys() - state.training) & phase.chips:
        reaction.kill(lingering)  # a chip went and came back, and its old process is still there
    elif isinstance(phase.answer, PlanFailed):
        _go_on_without(reaction, phase, phase.answer.why)
    else:
        _start(reaction, phase, phase.answer.members)


def _go_on_without(reaction: Reaction, phase: Planning, why: str) -> None:
    """There is no plan: training goes on as it is, or ends where its chips will go."""
    if phase.current is None:
        sentence = f"{why}; --resume goes on from the snapshots that there are"
        reaction.end(JobOutcome(1, sentence))
        return
    reaction.enter(Running(current=phase.current))
    if phase.chips.issuperset(phase.current.members):
        reaction.state = replace(reaction.state, refused=phase.chips)
        reaction.tell(f"{why}; training goes on as it is")
        reaction.rehearse()
    else:
        reaction.stop(JobOutcome(1, f"{why}; the last step is saved, --resume goes on from it"))


def _start(reaction: Reaction, phase: Planning, members: tuple[str, ...]) -> None:
    """Starts the members of a plan that was found, unless these are the ones that train."""
    state, before = reaction.state, phase.current
    if before and members == before.members:  # none of the chips that changed is of use
        history = replace(state.history, causes=())
        reaction.state = replace(state, served=phase.chips, history=history)
        reaction.enter(Running(current=before))
        reaction.rehearse()
        return
    generation = PlannedGeneration(
        number=state.number + 1,
        members=members,
        start="switch" if before else state.start,
        before=before.number if before else None,
        leavers=tuple(m for m in before.members if m not in members) if before else (),
        cause="; ".join(state.history.causes) or _unexplained(before, members),
        chips=phase.chips,
    )
    fresh = tuple(member for member in members if member not in state.live)
    reaction.state = replace(
        state,
        number=generation.number,
        history=state.history.plan_next(),
        finished=state.finished.difference(members),
        live={**state.live, **dict.fromkeys(fresh, generation.number)},
        # a chip lost by now may be why earlier starts failed, but not why this one does
        tries=0 if state.cost_a_chip else state.tries,
        cost_a_chip=False,
    )
    reaction.ask(StartMembers(generation=generation))
    deadline_s = reaction.now_s + _start_s(state)
    if before:
        reaction.enter(Joining(current=before, next=generation, deadline_s=deadline_s))
    else:
        reaction.enter(Starting(next=generation, deadline_s=deadline_s))


def _start_s(state: JobState) -> float:
    """Returns the seconds for a start: more than members wait, so that they say why first."""
    return START_S + state.settings.deadline_s


def _unexplained(before: PlannedGeneration | None, members: tuple[str, ...]) -> str:
    """Why another generation follows, where nothing happened."""
    left = [member for member in before.members if member not in members] if before else []
    return f"the best plan is without {', '.join(left)}" if left else UNEXPLAINED


# ---------------------------------------------------------------- a switch, or a start


def _decide_joining(reaction: Reaction, phase: Joining) -> None:
    state = reaction.state
    missing = [m for m in phase.next.joiners(phase.current) if m not in phase.ready]
    if state.completed:
        reaction.end(JobOutcome(0))
    elif phase.next.chips != state.roster.up():
        reaction.drop(phase)
    elif not missing:
        reaction.ask(AnnounceSwitch(number=phase.current.number, follower=phase.next.number))
        step_s = state.history.progress.step_s if state.history.progress else 0
        deadline_s = reaction.now_s + state.settings.deadline_s + 2 * step_s
        reaction.enter(Switching(current=phase.current, next=phase.next, deadline_s=deadline_s))
    elif reaction.late(phase.deadline_s):
        for member in missing:
            reaction.lose(member, f"did not come up in {_start_s(state):g} s")


def _decide_dropping(reaction: Reaction, phase: Dropping) -> None:
    if reaction.state.live.keys().isdisjoint(phase.next.joiners(phase.current)):
        reaction.ask(RemoveGeneration(number=phase.next.number))
        reaction.enter(Running(current=phase.current))
    elif reaction.late(phase.deadline_s):
        reaction.give_up("a member that was killed does not end")


def _decide_switching(reaction: Reaction, phase: Switching) -> None:
    if phase.account:
        _go_on(reaction, phase.next, phase.account)
    elif reaction.state.completed and not phase.begun:  # or else they may all have left
        reaction.end(JobOutcome(0))
    elif reaction.late(phase.deadline_s):
        reaction.note("the switch was not done in time")
        reaction.fence()


def _decide_starting(reaction: Reaction, phase: Starting) -> None:
    """Members that read the state have more time; those that hang end by themselves."""
    if phase.account:
        _go_on(reaction, phase.next, phase.account)
    elif reaction.late(phase.deadline_s + (READ_S if phase.reading else 0)):
        reaction.note("training did not start in time")
        reaction.fence()


def _go_on(reaction: Reaction, generation: PlannedGeneration, account: Account) -> None:
    """A generation has its state, and trains."""
    state, history = reaction.state, reaction.state.history
    reaction.ask(
        RecordChange(
            generation=generation,
            account=account,
            progress=history.progress,
            downtime_s=history.downtime_s(account, reaction.now_s),
        )
    )
    roster = state.roster
    for member in generation.leavers:
        if roster.standing[member] == "noticed":
            roster = roster.leave(member)
    history = history.go_on(account)
    noticed = (m for m in generation.members if roster.standing[m] == "noticed")
    will_go = [what for member in noticed if (what := f"{member} will go") not in history.causes]
    reaction.state = replace(
        state,
        roster=roster,
        history=history.because(*will_go),
        planned_for=generation.members,
        served=None if generation.start == "recover" else generation.chips,
        refused=None,
        linger_until_s=reaction.now_s + LINGER_S,
        awaited=None,
        cost_a_chip=False,
    )
    reaction.enter(Running(current=generation))
    reaction.forget_empty_nodes()
    reaction.rehearse()


# ---------------------------------------------------------------- training


def _decide_running(reaction: Reaction, phase: Running) -> None:
    state = reaction.state
    if state.completed:
        reaction.end(JobOutcome(0))
    elif not state.as_it_should_be and state.stop_by_s is None:
        reaction.plan(phase.current)
    elif reaction.late(state.linger_until_s):
        reaction.kill(state.live.keys() - set(phase.current.members))
