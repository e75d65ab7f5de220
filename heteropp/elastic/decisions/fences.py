"""The end of all members: whose fault it was, and whether the job goes on after it."""

from __future__ import annotations

from dataclasses import replace

from heteropp.elastic.decisions.commands import NameSilentMembers
from heteropp.elastic.decisions.events import SilentMembersNamed
from heteropp.elastic.decisions.phases import Awaiting, Fencing
from heteropp.elastic.decisions.reaction import Reaction
from heteropp.elastic.decisions.state import silence_s
from heteropp.elastic.messages import JobOutcome

TRIES = 3  # in a row without a step, but for those that cost a chip


def decide_fencing(reaction: Reaction, phase: Fencing) -> None:
    """Members whose node does not answer end with its lease, before the node counts as lost."""
    left = ", ".join(reaction.state.live)
    if not left:
        generations = tuple(each for each in (phase.current, phase.next) if each)
        reaction.ask(NameSilentMembers(generations=generations))
    elif reaction.late(phase.deadline_s) and not phase.awaits_leases:
        within_s = silence_s(reaction.state.settings.deadline_s)
        reaction.tell(f"not ended yet: {left}; the lease is awaited, at most {within_s:g} s")
        deadline_s = reaction.now_s + within_s
        reaction.enter(replace(phase, deadline_s=deadline_s, awaits_leases=True))
    elif reaction.late(phase.deadline_s):
        reaction.finish(JobOutcome(1, f"{left} cannot be ended"))


def hear_silent_members(reaction: Reaction, event: SilentMembersNamed) -> None:
    if not isinstance(reaction.state.phase, Fencing) or reaction.state.live:
        return
    for member in event.members:
        if reaction.state.roster.standing[member] != "lost":  # on another machine
            reaction.lose(member, "did not answer in time")
    _go_on_after_fence(reaction)


def _go_on_after_fence(reaction: Reaction) -> None:
    """No member is left: the job ends, or another generation follows."""
    reaction.forget_empty_nodes()
    state = reaction.state
    if state.verdict:
        reaction.finish(state.verdict)
        return
    tries = 0 if state.cost_a_chip else state.tries + 1
    reaction.state = state = replace(state, tries=tries, cost_a_chip=False)
    if tries == TRIES:
        why = state.history.last_cause()
        reaction.finish(JobOutcome(1, f"{why}; {TRIES} times in a row without a step"))
        return
    if state.history.is_kept(state.settings.keep_memory_every):
        reaction.state = state = replace(state, start="recover")
    awaited = state.awaited
    if awaited and not awaited.came_back(state.roster):
        reaction.note(awaited.sentence)
        reaction.enter(Awaiting(deadline_s=reaction.now_s + awaited.wait_s))
    else:
        reaction.plan(current=None)


def decide_awaiting(reaction: Reaction, phase: Awaiting) -> None:
    awaited = reaction.state.awaited
    assert awaited is not None  # no other way leads here
    if awaited.came_back(reaction.state.roster):
        reaction.plan(current=None)
    elif reaction.late(phase.deadline_s):
        reaction.finish(JobOutcome(1, awaited.in_vain))
