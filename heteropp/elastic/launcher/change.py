"""What became of the job from one generation to the next: for the screen and change.json."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from heteropp.description.outline import outline
from heteropp.description.plan import Plan
from heteropp.elastic.decisions.commands import RecordChange
from heteropp.elastic.launcher.plan_search import Planned
from heteropp.elastic.messages import MovedState, Source


@dataclass(frozen=True, kw_only=True)
class Change:
    number: int  # of the generation that it led to
    start: Literal["initial", "switch", "recover"]
    cause: str
    members: tuple[str, ...]  # by rank
    left: tuple[str, ...]  # members of the generation before that this one has not
    joined: tuple[str, ...]  # members that the one before had not
    plan_before: str | None  # in a line; None: there was none
    plan: str
    step: int  # completed; training went on at the next
    steps_again: int  # that had been trained before, and were lost
    searched_s: float  # for the plan; while the steps ran, of a switch
    downtime_s: float  # that no step ran
    at: float  # seconds since 1970 at which it was over, and training went on
    moved: tuple[MovedState, ...]

    def bytes_by_source(self) -> dict[Source, int]:
        """Returns how many bytes of the state came from each source, the nearest source first."""
        total: dict[Source, int] = {}
        for source in ("memory", "disk", "peer", "remote"):
            if size := sum(m.bytes for m in self.moved if m.source == source):
                total[source] = size
        return total


def changed(
    recorded: RecordChange, found: Planned, before: Change | None, plan_before: Plan
) -> Change:
    """What became of the job with a generation that has its state.

    found: its plan; before, plan_before: the change before, and the plan that it led to.
    """
    generation, account = recorded.generation, recorded.account
    members = before.members if before else ()
    again = recorded.progress.step - account.step if recorded.progress else 0
    return Change(
        number=generation.number,
        start=generation.start,
        cause=generation.cause if before else "",
        members=generation.members,
        left=tuple(m for m in members if m not in generation.members),
        joined=tuple(m for m in generation.members if m not in members),
        plan_before=outline(plan_before) if before else None,
        plan=outline(found.plan),
        step=account.step,
        steps_again=max(0, again),
        searched_s=found.seconds,
        downtime_s=recorded.downtime_s,
        at=time.time(),
        moved=account.moved,
    )
