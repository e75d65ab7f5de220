"""Reductions beside the work: each replica's one after another, each with all of its group."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReductionGroup:
    """Replicas that reduce together."""

    members: tuple[int, ...]
    seconds: float


def settle(
    groups: list[ReductionGroup], wanted: list[list[tuple[int, float]]]
) -> list[list[float]]:
    """Returns when each reduction ends, by replica and in the order of its `wanted`.

    wanted: each replica's groups, and when it has come to each.

    A reduction begins when every member has come to it and is free; the first that all have come
    to goes first, whatever order its members came in.
    """
    come = [0.0] * len(groups)
    for queue in wanted:
        for group, come_s in queue:
            come[group] = max(come[group], come_s)
    free = [0.0] * len(wanted)
    ends = [0.0] * len(groups)
    for g in sorted(range(len(groups)), key=lambda g: (come[g], g)):
        members = groups[g].members
        ends[g] = max(come[g], *(free[a] for a in members)) + groups[g].seconds
        for a in members:
            free[a] = ends[g]
    return [[ends[group] for group, _ in queue] for queue in wanted]
