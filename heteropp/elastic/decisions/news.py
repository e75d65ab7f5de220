"""What each event changes at once; what follows from that is decided at the end of the turn.

Losses alone do not wait: whoever still trains waits for the one that is lost, and is fenced.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from heteropp.elastic.decisions import fences
from heteropp.elastic.decisions.awaited import Awaited
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
from heteropp.elastic.decisions.phases import Joining, Planning, Starting, Switching
from heteropp.elastic.decisions.reaction import Reaction
from heteropp.elastic.decisions.turns import decide
from heteropp.elastic.messages import node_of


def hear(reaction: Reaction, event: Event) -> None:
    """Works through an event; what is said of a generation of the past has no effect."""
    phase = reaction.state.phase
    match event:
        case ChipsOffered():
            _hear_offer(reaction, event)
        case NoticeGiven():
            _hear_notice(reaction, event)
        case NodeLost():
            reaction.lose_node(event.node, event.silent_s)
        case MemberEnded():
            _hear_end(reaction, event)
        case TimePassed():
            _lose_overdue(reaction)
        case StepDone():
            _hear_step(reaction, event)
        case MemberReady():
            if isinstance(phase, Joining) and phase.next.number == event.number:
                reaction.enter(replace(phase, ready=phase.ready | {event.member}))
        case SwitchBegun():
            if isinstance(phase, Switching) and phase.current.number == event.number:
                reaction.enter(replace(phase, begun=True))
        case ReadingBegun():
            if isinstance(phase, Starting) and phase.next.number == event.number:
                reaction.enter(replace(phase, reading=True))
        case StateReady():
            if isinstance(phase, Starting | Switching) and phase.next.number == event.number:
                reaction.enter(replace(phase, account=event.account))
        case PlanFound() | PlanFailed():
            if isinstance(phase, Planning) and phase.search == event.search:
                reaction.enter(replace(phase, answer=event))
        case SilentMembersNamed():
            fences.hear_silent_members(reaction, event)
        case StopRequested():
            reaction.stop(event.verdict)
        case Tick():
            decide(reaction)


def _hear_offer(reaction: Reaction, event: ChipsOffered) -> None:
    state = reaction.state
    goes_at_s = event.at_s + state.settings.notice_s
    roster, going, coming = state.roster.offer(event.chips, goes_at_s)
    reaction.state = replace(state, roster=roster)
    if going:
        reaction.note(f"{', '.join(going)} will go")
    if coming:
        reaction.note(f"{', '.join(coming)} came")


def _hear_notice(reaction: Reaction, event: NoticeGiven) -> None:
    state = reaction.state
    roster = state.roster.notice(event.member, event.at_s + state.settings.notice_s)
    if roster is not state.roster:
        reaction.state = replace(state, roster=roster)
        reaction.note(f"{event.member} will go")


def _lose_overdue(reaction: Reaction) -> None:
    """Chips that had notice go when it runs out, in order where nobody trains on them."""
    for member in reaction.state.roster.overdue(reaction.now_s):
        state = reaction.state
        if member in state.training:
            reaction.lose(member, f"had {state.settings.notice_s:g} s to go")
        else:
            reaction.state = replace(state, roster=state.roster.leave(member))


def _hear_step(reaction: Reaction, event: StepDone) -> None:
    state = reaction.state
    if state.current is None or state.current.number != event.number:
        return
    history = state.history.hear(event.progress, event.at_s)
    if history is not state.history:
        reaction.state = replace(state, history=history, tries=0)


def _hear_end(reaction: Reaction, end: MemberEnded) -> None:
    state, member = reaction.state, end.member
    if state.live.get(member) != end.number:
        return
    live = {m: number for m, number in state.live.items() if m != member}
    reaction.state = state = replace(state, live=live)
    joins = state.joins(member)
    if end.code == 0:
        reaction.state = replace(state, finished=state.finished | {member})
    elif member not in state.training and state.current and not joins:
        pass  # it had left
    elif end.failure and end.failure.kind == "job":
        reaction.give_up(f"{member} {end.failure.what}")
    elif end.failure and end.failure.kind == "lost":
        _lack(reaction, f"{member} {end.failure.what}", end.failure.nodes)
    elif end.lost or (joins and not end.killed):
        reaction.lose(member, "did not answer in time" if end.silent else end.how)
    elif not end.killed:
        if end.failure:  # or else it ended because of another, which is heard, too
            reaction.note(f"{member} {end.how}")
        reaction.fence()


def _lack(reaction: Reaction, what: str, keepers: Collection[str]) -> None:
    """Waits for absent keepers, as no whole step is here; gives up if none can come back."""
    state = reaction.state
    here = state.next.members if state.next else ()
    known = set(keepers) & set(state.roster.nodes)
    awaited = Awaited.of(what, known, map(node_of, here), state.settings.deadline_s)
    if awaited.nodes and state.settings.chips_may_come:
        reaction.state = replace(state, awaited=awaited)
        reaction.fence()
    else:
        reaction.give_up(what)
