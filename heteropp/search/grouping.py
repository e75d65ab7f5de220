"""Dividing chips into device groups of equal power (AutoHet, section III-B, equation 3), exactly.

A device group is a pipeline whose stages are single units (a tensor-parallel group of one chip
type). Units of a type are alike, so a group is a count of each type: that makes an exact search
of what takes a solver with a variable a unit minutes.

With D groups and K = M / D micro-batches a group, a group of P units and power S has the effective
power G = S (1 - rho), rho = (P - 1) / (K + P - 1) (equation 2). G >= z is linear in the counts x:

    sum_t (g_t - z / K) x_t >= z (K - 1) / K

so what a unit is worth to its group adds up over all groups, which bounds the objective
D z <= M sum_t g_t n_t / (M + N - D) for N units, and prunes the search (csrc/planner/division.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass

from heteropp._planner import divide

Counts = tuple[int, ...]
TOLERANCE = 1e-12  # relative: of powers that were summed in another order


@dataclass(frozen=True)
class UnitType:
    """One type of unit: how many there are, and what each brings."""

    count: int
    power: float  # FLOPS, or in any unit
    memory_bytes: float


@dataclass(frozen=True)
class Grouping:
    groups: tuple[Counts, ...]  # of each type in each group, strongest group first
    objective: float  # number of groups x least effective power (equation 3a)
    steps: int  # groups tried


def effective_power(types: list[UnitType], group: Counts, micro_batches: int) -> float:
    """Returns the effective power G (equation 2) of a group that takes so many micro-batches."""
    power = sum(t.power * n for t, n in zip(types, group, strict=True))
    return power * micro_batches / (micro_batches + sum(group) - 1)


def group_devices(
    types: list[UnitType], least_memory_bytes: float, micro_batches: int
) -> Grouping | None:
    """Returns the grouping of all units that maximises equation 3a, or None where none fits.

    The number of groups divides the step's micro-batches, so that all groups train alike.
    """
    search = _GroupingSearch(types, least_memory_bytes, micro_batches)
    return search.run()


class _GroupingSearch:
    def __init__(
        self, types: list[UnitType], least_memory_bytes: float, micro_batches: int
    ) -> None:
        self.types, self.micro_batches = types, micro_batches
        self.least_memory_bytes = least_memory_bytes
        self.everything = tuple(t.count for t in types)
        self.best: list[Counts] | None = None
        self.objective = 0.0
        self.steps = 0

    def run(self) -> Grouping | None:
        numbers = self._numbers_of_groups()
        for groups in numbers:
            self._keep(spread(self.types, groups))  # often the best, and found at once
        for groups in numbers:
            while self._bound(groups) > self.objective * (1 + TOLERANCE):
                found = self._better(groups)
                if found is None:
                    break
                self._keep(found)
        if self.best is None:
            return None
        share = self.micro_batches // len(self.best)
        ordered = sorted(self.best, key=lambda g: (-effective_power(self.types, g, share), g))
        return Grouping(tuple(ordered), self.objective, self.steps)

    def _numbers_of_groups(self) -> list[int]:
        """Returns the possible numbers of groups, largest first, as their bound is highest."""
        memory = sum(t.memory_bytes * t.count for t in self.types)
        most = min(sum(self.everything), self.micro_batches)
        return [
            groups
            for groups in range(most, 0, -1)
            if self.micro_batches % groups == 0 and groups * self.least_memory_bytes <= memory
        ]

    def _bound(self, groups: int) -> float:
        power = sum(t.power * t.count for t in self.types)
        units = sum(self.everything)
        return power * self.micro_batches / (self.micro_batches + units - groups)

    def _better(self, groups: int) -> list[Counts] | None:
        """Returns a grouping into so many groups that beats the best so far, or None."""
        least = self.objective * (1 + TOLERANCE) / groups
        found, steps = divide(
            power=[t.power for t in self.types],
            memory=[t.memory_bytes for t in self.types],
            everything=list(self.everything),
            groups=groups,
            micro_batches=self.micro_batches // groups,
            least_power=least,
            least_memory=self.least_memory_bytes,
        )
        self.steps += steps
        return None if found is None else [tuple(group) for group in found]

    def _keep(self, found: list[Counts]) -> None:
        """Keeps a grouping if it is better than the best so far, and has the memory."""
        share = self.micro_batches // len(found)
        for group in found:
            memory = sum(t.memory_bytes * n for t, n in zip(self.types, group, strict=True))
            if memory < self.least_memory_bytes:
                return
        objective = len(found) * min(effective_power(self.types, g, share) for g in found)
        if objective > self.objective:
            self.best, self.objective = found, objective


def spread(types: list[UnitType], groups: int) -> list[Counts]:
    """Deals every unit, the most powerful first, to the group that is weakest so far."""
    counts = [[0] * len(types) for _ in range(groups)]
    power = [0.0] * groups
    for index in sorted(range(len(types)), key=lambda i: (-types[i].power, i)):
        for _ in range(types[index].count):
            weakest = min(range(groups), key=lambda g: (power[g], g))
            counts[weakest][index] += 1
            power[weakest] += types[index].power
    return [tuple(group) for group in counts]
