"""What the leader waits for, one phase at a time.

Whenever the chips that are up are not those of the generation that trains, another one is
prepared:

    Planning -> Joining -> Switching -> Running     a switch: the steps run on meanwhile
    Planning -> Starting -> Running                 a start or a recovery: all members are new
    Joining -> Dropping -> Running                  a switch that is cancelled, as chips changed

A loss leads from everywhere to Fencing, and from there to Planning and a recovery, or to Awaiting
where a recovery lacks snapshots that an absent node may have. The end of the job comes after
Fencing too, and is Over. Each deadline is monotonic time.
"""

from __future__ import annotations

from dataclasses import dataclass

from heteropp.elastic.decisions.commands import PlannedGeneration
from heteropp.elastic.decisions.events import PlanFailed, PlanFound
from heteropp.elastic.messages import Account, JobOutcome


@dataclass(frozen=True, kw_only=True)
class Planning:
    """A plan for the chips that are to train is searched."""

    current: PlannedGeneration | None  # that trains meanwhile; None: for a start or a recovery
    search: int
    chips: frozenset[str]  # that the plan is for
    deadline_s: float
    answer: PlanFound | PlanFailed | None = None


@dataclass(frozen=True, kw_only=True)
class Joining:
    """A switch is prepared: members that are new open their chips, while the steps run."""

    current: PlannedGeneration
    next: PlannedGeneration
    deadline_s: float
    ready: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Switching:
    """The generation that trains was told to switch; it becomes the new one after a step."""

    current: PlannedGeneration
    next: PlannedGeneration
    deadline_s: float
    begun: bool = False  # whether the generation that trains has set its last step
    account: Account | None = None  # of the new one, once it has its state


@dataclass(frozen=True, kw_only=True)
class Starting:
    """All members are new: they come up and read the state."""

    next: PlannedGeneration
    deadline_s: float  # to come up
    reading: bool = False
    account: Account | None = None  # once it has its state


@dataclass(frozen=True, kw_only=True)
class Running:
    """The chips that are up train; members watch each other, and their ends are heard."""

    current: PlannedGeneration


@dataclass(frozen=True, kw_only=True)
class Dropping:
    """The members that a cancelled switch had started are killed."""

    current: PlannedGeneration
    next: PlannedGeneration
    deadline_s: float


@dataclass(frozen=True, kw_only=True)
class Fencing:
    """All members are killed, so that none is left when others take over its work."""

    current: PlannedGeneration | None
    next: PlannedGeneration | None
    deadline_s: float
    awaits_leases: bool = False  # of nodes that did not end their members: they may be cut off


@dataclass(frozen=True, kw_only=True)
class Awaiting:
    """A recovery lacks snapshots that a node without chips may have, which may come back."""

    deadline_s: float


@dataclass(frozen=True, kw_only=True)
class Over:
    """The job has ended, and nothing follows."""

    outcome: JobOutcome
    current: PlannedGeneration | None  # that trained last


Phase = Planning | Joining | Switching | Starting | Running | Dropping | Fencing | Awaiting | Over
