"""Reductions beside the work: each actor's one after another, each with all of its group."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Actors that reduce together."""

    members: tuple[int, ...]
    seconds: float


class UnmatchedError(RuntimeError):
    """A group that never comes together; `missing` are the members that it waits for."""

    def __init__(self, members: tuple[int, ...], missing: tuple[int, ...]) -> None:
        super().__init__(f"actors {members} wait for {missing}")
        self.members, self.missing = members, missing


def settle(groups: list[Group], wanted: list[list[tuple[int, float]]]) -> list[list[float]]:
    """When each reduction ends; `wanted` are each actor's (group, earliest begin), in order.

    A reduction begins when every member has come to it and has ended its one before.
    Raises UnmatchedError.
    """
    ends: list[list[float]] = [[] for _ in wanted]
    queues = [deque(queue) for queue in wanted]
    joined: list[dict[int, float]] = [{} for _ in groups]
    ready = deque(a for a, queue in enumerate(queues) if queue)
    while ready:
        a = ready.popleft()
        group, begin_s = queues[a][0]
        joined[group][a] = max(begin_s, ends[a][-1]) if ends[a] else begin_s
        members = groups[group].members
        if len(joined[group]) < len(members):
            continue
        end_s = max(joined[group].values()) + groups[group].seconds
        for member in members:
            queues[member].popleft()
            ends[member].append(end_s)
            if queues[member]:
                ready.append(member)
    for queue in queues:
        if queue:
            group, _ = queue[0]
            there = joined[group]
            missing = tuple(m for m in groups[group].members if m not in there)
            raise UnmatchedError(tuple(there), missing)
    return ends
