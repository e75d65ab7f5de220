"""All that the leader knows of an elastic job. A state is never changed: a new one follows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from heteropp.elastic.decisions.awaited import Awaited
from heteropp.elastic.decisions.commands import FirstStart, PlannedGeneration
from heteropp.elastic.decisions.history import History
from heteropp.elastic.decisions.phases import (
    Awaiting,
    Dropping,
    Fencing,
    Joining,
    Over,
    Phase,
    Planning,
    Running,
    Starting,
    Switching,
)
from heteropp.elastic.decisions.roster import Roster
from heteropp.elastic.messages import JobOutcome

MOST_SILENT_S = 30.0  # connections outlive no longer silence of the network either


def silence_s(deadline_s: float) -> float:
    """Returns for how long a node may be silent before it counts as lost.

    deadline_s: the job's, that members have to answer each other.
    """
    return min(deadline_s, MOST_SILENT_S)


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """What the user asked for, as far as decisions depend on it."""

    deadline_s: float  # that members have to answer each other
    notice_s: float  # that a chip lives on after a notice
    keep_memory_every: int  # steps
    chips_may_come: bool  # whether there is an availability that says so


@dataclass(frozen=True, kw_only=True)
class JobState:
    settings: JobSettings
    phase: Phase
    roster: Roster
    history: History
    start: FirstStart  # of a generation that follows on none
    planned_for: tuple[str, ...]  # by rank: the members of the plan that trains, or trained last
    number: int  # of the newest generation
    searches: int = 0  # that were begun
    live: Mapping[str, int]  # members' processes, each with the generation it was started for
    finished: frozenset[str] = frozenset()  # members that ended in order
    # chips that the current plan is the best one for; None: that is to be seen
    served: frozenset[str] | None = None
    refused: frozenset[str] | None = None  # chips for which there is no plan
    linger_until_s: float = 0.0  # monotonic: members that left have so long to end by themselves
    tries: int = 0  # in a row without a step, but for those that cost a chip
    cost_a_chip: bool = False  # whether what happened since the last start or step did
    awaited: Awaited | None = None  # what the last recovery lacked
    stop_by_s: float | None = None  # monotonic; None: not told to stop
    verdict: JobOutcome | None = None  # the outcome, once all members have ended

    @property
    def current(self) -> PlannedGeneration | None:
        """The generation that trains, or trained until it was fenced."""
        match self.phase:
            case Starting() | Awaiting():
                return None
            case (
                Planning(current=current)
                | Joining(current=current)
                | Switching(current=current)
                | Running(current=current)
                | Dropping(current=current)
                | Fencing(current=current)
                | Over(current=current)
            ):
                return current

    @property
    def next(self) -> PlannedGeneration | None:
        """The generation that was started, and does not train yet."""
        match self.phase:
            case (
                Joining(next=follower)
                | Switching(next=follower)
                | Starting(next=follower)
                | Dropping(next=follower)
                | Fencing(next=follower)
            ):
                return follower
            case _:
                return None

    @property
    def training(self) -> frozenset[str]:
        """The members without whom training cannot go on."""
        generations = [self.current]
        if isinstance(self.phase, Starting | Switching):
            generations.append(self.next)
        return frozenset(member for each in generations if each for member in each.members)

    def joins(self, member: str) -> bool:
        """Whether a member is joining, so that no step needs it yet."""
        return isinstance(self.phase, Joining | Dropping) and member not in self.training

    @property
    def trainable(self) -> frozenset[str]:
        """The members that are up; for a start, noticed ones too: they may hold state."""
        return self.roster.up() if self.current else self.roster.there()

    @property
    def as_it_should_be(self) -> bool:
        """Whether no better plan is to be looked for."""
        return self.roster.up() in (self.refused, self.served)

    @property
    def completed(self) -> bool:
        """Whether the training has come to its end."""
        return self.current is not None and self.finished.issuperset(self.current.members)
