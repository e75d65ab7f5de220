"""The search that Metis and metis-oom share: for each arrangement, degrees until memory suffices.

Every stage starts with all its chips as replicas. Where the balanced layers do not fit, or fit only
after some were moved, one stage halves its replicas and doubles its tensor-parallel degree; the two
planners differ in which stage that is.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from heteropp.search.metis_balance import partition, relieved
from heteropp.search.metis_cost import (
    Arrangement,
    Boundaries,
    Degrees,
    DeviceGroup,
    Line,
    MetisPlan,
    cost,
)
from heteropp.search.metis_groups import arrangements
from heteropp.search.metis_problem import Problem

PARTITIONS = 3  # tried for each choice of degrees


@dataclass
class Tried:
    """What the last partition showed: the memory that each stage had left, in bytes."""

    left: list[float] | None = None  # under the partition that fits; None if none does
    first_left: list[float] | None = None  # under the first partition, if that did not fit


Priority = Callable[[Tried, Degrees], list[float]]  # the stage with the least is changed


class Walk:
    """Metis's search over degrees and layers, and how much of it was done."""

    def __init__(self, problem: Problem, priority: Priority) -> None:
        self.problem = problem
        self.priority = priority
        self.steps = 0  # changes of degrees and of layers on the way to a plan, as published
        self.looks = 0  # choices of degrees, whether or not they led to a plan
        self.plans = 0
        self.complete = True
        self.best: list[tuple[float, MetisPlan]] = []  # seconds, cheapest first
        self.nearest: MetisPlan | None = None  # of those that do not fit, the least too large
        self._overrun = math.inf  # of that: need over room

    def run(self, keep: int, most_looks: float = math.inf, limit_s: float = math.inf) -> None:
        """Finds the `keep` cheapest plans that fit, or the best found within the limits."""
        deadline = time.monotonic() + limit_s
        lines = {order: Line(self.problem, order) for order in self.problem.orders}
        for arrangement in arrangements(self.problem):
            if self.looks >= most_looks or time.monotonic() > deadline:
                self.complete = False
                return
            line = lines[arrangement.order]
            for plan in self._plans(line, arrangement):
                self.plans += 1
                cost_s = cost(self.problem, line, plan).total_s
                if len(self.best) < keep or cost_s < self.best[-1][0]:
                    found = sorted([*self.best, (cost_s, plan)], key=lambda pair: pair[0])
                    self.best = found[:keep]

    def _plans(self, line: Line, arrangement: Arrangement) -> Iterator[MetisPlan]:
        degrees: Degrees | None = tuple((size, 1) for size in arrangement.groups)
        tried, steps = Tried(), 0
        while degrees is not None:
            self.looks += 1
            groups = _stage_groups(line, arrangement, degrees)
            if groups:
                boundaries, moved = self._partition(groups, arrangement, degrees, tried)
                steps += moved
                if boundaries:
                    self.steps, steps = self.steps + steps, 0
                    yield MetisPlan(arrangement, degrees, boundaries)
                    if not moved:
                        return
            degrees = _changed(degrees, self.priority(tried, degrees))
            steps += 1

    def _partition(
        self, groups: list[DeviceGroup], arrangement: Arrangement, degrees: Degrees, tried: Tried
    ) -> tuple[Boundaries | None, int]:
        """Returns boundaries whose layers fit, or None, and how often layers were moved."""
        speeds = [1 / group.seconds(0, self.problem.profiles.layers) for group in groups]
        total = sum(speeds)
        speeds = [speed / total for speed in speeds]
        tried.left = tried.first_left = None
        for moved in range(PARTITIONS):
            boundaries = partition(speeds, self.problem.layer_shares)
            needs, rooms = _memory(groups, boundaries, arrangement.micro_batches)
            left = [room - need for need, room in zip(needs, rooms, strict=True)]
            if min(left) >= 0:
                tried.left = left
                return boundaries, moved
            tried.first_left = tried.first_left or left
            overrun = max(need / room for need, room in zip(needs, rooms, strict=True))
            if overrun < self._overrun:
                self._overrun = overrun
                self.nearest = MetisPlan(arrangement, degrees, boundaries)
            relief = relieved(speeds, needs, rooms)
            if relief is None:
                return None, moved + 1
            speeds = relief
        return None, PARTITIONS


def _memory(
    groups: list[DeviceGroup], boundaries: Boundaries, micro_batches: int
) -> tuple[list[float], list[float]]:
    """Returns the bytes that each stage needs under 1F1B, and the bytes that it has."""
    needs, rooms = [], []
    layers = itertools.pairwise(boundaries)
    for after, group, held in zip(range(len(groups), 0, -1), groups, layers, strict=True):
        need, room = group.memory(*held, in_flight=min(after, micro_batches))
        needs.append(need)
        rooms.append(room)
    return needs, rooms


def by_replicas(degrees: Degrees) -> list[float]:
    """Returns the priorities where memory says nothing: the stage with most replicas is first."""
    return [1 / dp for dp, _ in degrees]


def _stage_groups(
    line: Line, arrangement: Arrangement, degrees: Degrees
) -> list[DeviceGroup] | None:
    """Returns the group of each stage, or None if a stage cannot have its degrees."""
    first, groups = 0, []
    for size, (_, tp) in zip(arrangement.groups, degrees, strict=True):
        group = line.group(first, size, tp, arrangement.micro_batches)
        if group is None:
            return None
        groups.append(group)
        first += size
    return groups


def _changed(degrees: Degrees, priority: list[float]) -> Degrees | None:
    for stage in sorted(range(len(degrees)), key=lambda stage: priority[stage]):
        dp, tp = degrees[stage]
        if dp > 1:
            return (*degrees[:stage], (dp // 2, tp * 2), *degrees[stage + 1 :])
    return None
