"""What can happen to an elastic job, as the leader hears of it."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from heteropp.elastic.messages import Account, Failure, JobOutcome, Progress


@dataclass(frozen=True, kw_only=True)
class Happened:
    """What all events have: time passes by them alone."""

    at_s: float  # monotonic: when the leader heard of it


# ---------------------------------------------------------------- chips and nodes


@dataclass(frozen=True, kw_only=True)
class ChipsOffered(Happened):
    """Availability's newest picture; it is heard again and again, whether it is new or not."""

    chips: Mapping[str, int]  # by node; a node that is not named has none


@dataclass(frozen=True, kw_only=True)
class NoticeGiven(Happened):
    """A member was told by SIGTERM that its chip will go."""

    member: str


@dataclass(frozen=True, kw_only=True)
class NodeLost(Happened):
    """The agent of a node is silent for too long; it is heard again and again.

    It cannot report that its members ended: they have, as their lease has run out.
    """

    node: str
    silent_s: float


# ---------------------------------------------------------------- members


@dataclass(frozen=True, kw_only=True)
class MemberEnded(Happened):
    """A member's process ended; those that took their chips along are heard of first."""

    member: str
    number: int  # of the generation that it was started for
    code: int  # exit code; -9 for signal 9
    killed: bool  # as the leader wished
    failure: Failure | None = None  # what it said itself
    silent: bool = False  # whether the others had waited for it in vain

    @property
    def lost(self) -> bool:
        """Whether its chip went with it: a chip that fails, and a process killed by others."""
        if self.failure:
            return self.failure.kind == "chip"
        return self.code < 0 and not self.killed

    @property
    def how(self) -> str:
        """How the process ended, to follow the member's name in a sentence."""
        if self.failure:
            return self.failure.what
        if self.code < 0:
            return f"was killed by {signal.Signals(-self.code).name}"
        return f"ended with exit code {self.code}"


@dataclass(frozen=True, kw_only=True)
class MemberReady(Happened):
    """A member that was started for a switch has its chip open, and waits."""

    number: int  # of the generation that is switched to
    member: str


@dataclass(frozen=True, kw_only=True)
class SwitchBegun(Happened):
    """The generation that trains has set its last step, after which all of its members may end."""

    number: int  # of that generation


@dataclass(frozen=True, kw_only=True)
class ReadingBegun(Happened):
    """A recovery's members have come up, and read the state."""

    number: int


@dataclass(frozen=True, kw_only=True)
class StateReady(Happened):
    """A generation has its state, and begins to train."""

    number: int
    account: Account


@dataclass(frozen=True, kw_only=True)
class StepDone(Happened):
    """The progress of the newest step; it is heard again and again, whether it is new or not."""

    number: int  # of the generation that trained it
    progress: Progress


# ---------------------------------------------------------------- answers to commands


@dataclass(frozen=True, kw_only=True)
class PlanFound(Happened):
    """Answers SearchPlan with a plan, which whoever searched it keeps."""

    search: int  # which SearchPlan this answers
    members: tuple[str, ...]  # by rank: of the chips that were asked for, those that the plan uses


@dataclass(frozen=True, kw_only=True)
class PlanFailed(Happened):
    """Answers SearchPlan, as there is no plan for these chips."""

    search: int
    why: str  # a sentence


@dataclass(frozen=True, kw_only=True)
class SilentMembersNamed(Happened):
    """Answers NameSilentMembers: those for whom the others waited in vain."""

    members: tuple[str, ...]


# ---------------------------------------------------------------- the user, and time


@dataclass(frozen=True, kw_only=True)
class StopRequested(Happened):
    """The job is to end after the step, which is saved."""

    verdict: JobOutcome  # the outcome that it is to end with


@dataclass(frozen=True, kw_only=True)
class TimePassed(Happened):
    """The ends of members have been heard up to now, so that notices that ran out count."""


@dataclass(frozen=True, kw_only=True)
class Tick(Happened):
    """All that is new has been heard: it is time to decide."""


Event = (
    ChipsOffered
    | NoticeGiven
    | NodeLost
    | MemberEnded
    | MemberReady
    | SwitchBegun
    | ReadingBegun
    | StateReady
    | StepDone
    | PlanFound
    | PlanFailed
    | SilentMembersNamed
    | StopRequested
    | TimePassed
    | Tick
)
