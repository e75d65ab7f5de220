"""What the leader's decisions ask for; some are answered by an event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from heteropp.elastic.messages import Account, Progress

FirstStart = Literal["initial", "recover"]  # how a generation starts that follows on none


@dataclass(frozen=True, kw_only=True)
class PlannedGeneration:
    """A generation, as far as decisions are concerned."""

    number: int
    members: tuple[str, ...]  # by rank
    start: Literal["initial", "switch", "recover"]
    before: int | None = None  # for a switch: the generation that goes on
    leavers: tuple[str, ...] = ()  # for a switch: members of that one who end with it
    cause: str = ""  # what made it necessary, a sentence
    chips: frozenset[str] = frozenset()  # that the plan was searched for; it may not use them all

    def joiners(self, current: PlannedGeneration) -> tuple[str, ...]:
        """The members that a switch to this generation has to start."""
        return tuple(member for member in self.members if member not in current.members)


@dataclass(frozen=True, kw_only=True)
class SearchPlan:
    """Begins the search of a plan beside whatever else happens; PlanFound or PlanFailed answers."""

    search: int  # told in the answer, as an earlier search may still be under way
    members: tuple[str, ...]  # whose chips may be used
    before: tuple[str, ...]  # by rank: members of the plan that there is
    nodes: tuple[str, ...]  # a plan that uses them all is preferred, as they may hold state
    may_keep: bool  # whether the plan that there is will do, where it is for these very members


@dataclass(frozen=True, kw_only=True)
class StartMembers:
    """Writes the generation's plan, as it was found last, and tells the agents of it."""

    generation: PlannedGeneration


@dataclass(frozen=True, kw_only=True)
class KillMembers:
    """Ends members; MemberEnded follows for each, or NodeLost for its node."""

    members: tuple[tuple[str, int], ...]  # each with the generation that it was started for


@dataclass(frozen=True, kw_only=True)
class AnnounceSwitch:
    """Tells the generation that trains which one is to follow."""

    number: int
    follower: int


@dataclass(frozen=True, kw_only=True)
class AnnounceStop:
    """Tells all members to end after the running step, which they save."""


@dataclass(frozen=True, kw_only=True)
class RemoveGeneration:
    """Removes the folder of a generation that never trained."""

    number: int


@dataclass(frozen=True, kw_only=True)
class RecordChange:
    """Keeps and shows the change to a generation that has its state."""

    generation: PlannedGeneration
    account: Account
    progress: Progress | None  # of the generation before
    downtime_s: float


@dataclass(frozen=True, kw_only=True)
class RehearseSearch:
    """Searches plans for these members, and for those left after a loss, and drops them.

    So what the next search will need is traced by then.
    """

    members: tuple[str, ...]  # whose chips may be used
    before: tuple[str, ...]  # by rank: members of the plan that there is


@dataclass(frozen=True, kw_only=True)
class ForgetMemory:
    """Removes what nodes without chips kept in host memory, where a machine plays several nodes."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class NameSilentMembers:
    """Asks for whom the others of these generations waited in vain; SilentMembersNamed answers."""

    generations: tuple[PlannedGeneration, ...]


@dataclass(frozen=True, kw_only=True)
class Tell:
    """Tells the user a sentence."""

    sentence: str


Command = (
    SearchPlan
    | StartMembers
    | KillMembers
    | AnnounceSwitch
    | AnnounceStop
    | RemoveGeneration
    | RecordChange
    | RehearseSearch
    | ForgetMemory
    | NameSilentMembers
    | Tell
)
