"""Memory of a rank over a step: what its actions hold, at the times they are simulated."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from heteropp.cost.planned import memory_walk
from heteropp.description.cluster import Cluster
from heteropp.description.plan import Plan
from heteropp.schedule.action import Action, Kind

# a message or a reduction goes on beside the work; what it holds is held from its begin
BESIDE = frozenset({Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT, Kind.REDUCE})


@dataclass(frozen=True)
class MemoryCurve:
    """bytes[i] are held from times_s[i] to times_s[i + 1], during actions[i] or after it."""

    times_s: list[float]
    bytes: list[int]
    actions: list[Action]

    @property
    def peak_bytes(self) -> int:
        return max(self.bytes)

    def at(self, time_s: float) -> int:
        return self.bytes[max(bisect_right(self.times_s, time_s) - 1, 0)]

    def points(self) -> list[tuple[float, int]]:
        return list(zip(self.times_s, self.bytes, strict=True))

    def first_over(self, capacity_bytes: int) -> tuple[float, int, Action] | None:
        """Returns when a capacity is first exceeded, the bytes needed then, and the action."""
        for time_s, size, action in zip(self.times_s, self.bytes, self.actions, strict=True):
            if size > capacity_bytes:
                return time_s, size, action
        return None


def memory_curve(
    plan: Plan, cluster: Cluster, rank: int, rows: Iterable[tuple[Action, float, float]]
) -> MemoryCurve:
    """Returns the memory of one rank over a step.

    rows: its actions, in order, each with its begin and end in seconds.
    """
    rows = list(rows)
    walk = memory_walk(plan, rank, cluster, [action for action, *_ in rows])
    times, sizes, actions = [0.0], [walk.before()], [Action(Kind.F, 0)]
    for (action, start_s, end_s), (during, after) in zip(rows, walk.moments(), strict=True):
        times += [start_s, start_s if action.kind in BESIDE else end_s]
        sizes += [during, after]
        actions += [action, action]
    return MemoryCurve(times, sizes, actions)
