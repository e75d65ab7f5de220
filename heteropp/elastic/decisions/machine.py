"""The leader's state machine: a state and an event give the next state, and what is to be done."""

from __future__ import annotations

from heteropp.elastic.decisions.commands import Command, FirstStart
from heteropp.elastic.decisions.events import Event
from heteropp.elastic.decisions.history import History
from heteropp.elastic.decisions.news import hear
from heteropp.elastic.decisions.phases import Over
from heteropp.elastic.decisions.reaction import Reaction, planning_for, search_for
from heteropp.elastic.decisions.roster import Roster
from heteropp.elastic.decisions.state import JobSettings, JobState

Decision = tuple[JobState, tuple[Command, ...]]


def begin(
    settings: JobSettings,
    roster: Roster,
    start: FirstStart,
    planned_for: tuple[str, ...],
    number: int,
    at_s: float,
) -> Decision:
    """Returns the state that a job begins with, in which a plan is searched.

    planned_for: the members of the plan that there is, by rank; number: of the newest generation,
    of an earlier start of the job.
    """
    planning = planning_for(roster, None, 1, at_s)
    state = JobState(
        settings=settings,
        phase=planning,
        roster=roster,
        history=History(progress_at_s=at_s),
        start=start,
        planned_for=planned_for,
        number=number,
        searches=planning.search,
        live={},
    )
    return state, (search_for(state, planning),)


def react(state: JobState, event: Event) -> Decision:
    """Returns the state after an event, and the commands to be carried out, in order.

    Commands are carried out before the next event is made, as an answer is one.
    """
    if isinstance(state.phase, Over):
        return state, ()
    reaction = Reaction(state, event)
    hear(reaction, event)
    return reaction.state, tuple(reaction.commands)
