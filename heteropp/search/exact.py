"""The exact planner: the best plan of one pipeline in HeteroAuto's space, proven (section 4.3).

Decided jointly: the data-parallel degree, and for each chip type its tensor-parallel degree, its
number of stages, its layers (the same for each of its stages) and recompute; or the same for each
128 chips of a type, as in the second stage of section 4.3.3. All chips are used; chips with more
memory come first (Observation #4). `uneven_layers` lets every stage hold its own number of layers,
with or without recompute; `stage_degrees` lets it have its own degrees, which divide the
micro-batch among its replicas; `context_parallel` lets a type's stages, or each stage, also cut
sequences over the groups of a replica, and `expert_parallel` spread experts over groups. The
formula of section 4.3.2,
    T = max_i (b T_i + U_i + alpha sum_{j != i} T_j),
is minimised by a dynamic programme over stages, chips and layers (csrc/planner/chain.cpp).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

from heteropp import _planner
from heteropp.description.plan import Plan
from heteropp.search.costs import Costs
from heteropp.search.planner import Candidate, Request, Result, SearchError, does_not_fit
from heteropp.search.space import Space, StageChoice, Widths
from heteropp.search.tables import Allowed, Tables, check_schedule

RUNNERS_UP = 3
THOROUGH = 1 << 15  # chains of one length that are kept; what is dropped shows in the bound
QUICK = 32  # and in the search for what nearly fits
FINEST = 1 / 256  # of a chip's memory: how exactly the nearest plan is found


def search(request: Request) -> Result:
    """The best plan in the space. Raises SearchError, or DoesNotFitError where memory rules."""
    check_schedule("exact", request)
    return _Exact(Space(request)).run()


@dataclass(frozen=True)
class _BestStages:
    """The best stages of one part of the space, which may be limited to some degrees."""

    cost_s: float
    part: int
    allowed: Allowed
    degrees: tuple[Widths, ...]
    stages: tuple[StageChoice, ...]

    def key(self) -> tuple:
        held = tuple((s.degrees, s.recompute, s.layers) for s in self.stages)
        return (self.cost_s, self.part, held)


class _Exact:
    """The search; each part of its space is one way to cut the batch and to group the chips."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.request = space.request
        self.steps = 0
        costs = Costs(space)
        self.parts = [
            Tables(space, costs, share, groups)
            for groups in space.groupings
            for share in space.shares
            if space.uses_all(groups, share)
        ]

    def run(self) -> Result:
        pool: list[tuple[tuple, _BestStages]] = []
        bounds = []
        for part in self._order():
            found, bound_s = self._solve(part, THOROUGH, self._cutoff_s(pool, RUNNERS_UP))
            bounds.append(bound_s)
            if found:
                heapq.heappush(pool, (found.key(), found))
        if not pool:
            raise self._does_not_fit()
        ranked = self._ranked(pool)
        candidates = [Candidate(self._plan(found), found.cost_s) for found in ranked]
        best = candidates[0]
        return Result(
            planner="exact",
            best=best,
            runners_up=candidates[1:],
            lower_bound_s=min(best.cost_s, *bounds),
            steps=self.steps,
        )

    def _order(self) -> list[int]:
        """Returns all parts; where they are large, those that look best come first."""
        parts = list(range(len(self.parts)))
        if not self.request.stage_degrees:
            return parts
        quick = [self._solve(part, QUICK)[0] for part in parts]
        return sorted(parts, key=lambda part: found.cost_s if (found := quick[part]) else math.inf)

    def _cutoff_s(self, pool: list[tuple[tuple, _BestStages]], others: int) -> float:
        """Returns the seconds beyond which a plan cannot be the best or one of so many others.

        Each grouping may find the same plan, so that many more must be cheaper. Where parts are
        large, only the best is looked for.
        """
        costs = sorted(key[0] for key, _ in pool)
        least = 1 if self.request.stage_degrees else (others + 1) * len(self.space.groupings)
        return costs[least - 1] if len(costs) >= least else math.inf

    def _plan(self, found: _BestStages) -> Plan:
        return self.space.plan(self.parts[found.part].share, found.stages)

    def _ranked(self, pool: list[tuple[tuple, _BestStages]]) -> list[_BestStages]:
        """Returns the best few plans of unlike degrees, best first.

        Each is the best of what is left of the space without the degrees of those before it.

        A part of the space is cut into what keeps the found degrees for the first few groups and
        not for the next (Lawler, 1972). That is done where degrees are by chip type; of the other
        parts only their best is taken.
        """
        ranked: list[_BestStages] = []
        while pool and len(ranked) <= RUNNERS_UP:
            _, best = heapq.heappop(pool)
            if not any(found.stages == best.stages for found in ranked):
                ranked.append(best)
            by_type = len(best.degrees) == len(self.space.types)
            if self.request.stage_degrees or not by_type or len(ranked) > RUNNERS_UP:
                continue
            cutoff_s = self._cutoff_s(pool, RUNNERS_UP - len(ranked))
            for allowed in _without(best):
                found, _ = self._solve(best.part, THOROUGH, cutoff_s, allowed)
                if found:
                    heapq.heappush(pool, (found.key(), found))
        return ranked

    def _solve(
        self, part: int, width: int, cutoff_s: float = math.inf, allowed: Allowed | None = None
    ) -> tuple[_BestStages | None, float]:
        """Returns the best plan of a part, if it costs at most the cutoff, and a lower bound."""
        tables = self.parts[part]
        allowed = allowed or tables.everything
        best: _BestStages | None = None
        bound_s = math.inf
        for problem in tables.problems(allowed):
            solution = _planner.solve(problem, cutoff_s, width)
            self.steps += solution.steps
            bound_s = min(bound_s, solution.lower_bound_s)
            if solution.stages and (best is None or solution.cost_s < best.cost_s):
                degrees, stages = tables.degrees(solution), tables.stages(solution)
                best = _BestStages(solution.cost_s, part, allowed, degrees, stages)
                cutoff_s = min(cutoff_s, solution.cost_s)
        return best, bound_s

    def _does_not_fit(self) -> SearchError:
        """Returns the error that shows the plan that overruns memory least.

        A bisection finds that plan, to FINEST of a chip's memory.
        """
        most = max(chips.chip.memory.capacity_bytes for chips in self.space.types)
        too_little, enough = 0.0, FINEST * most
        while (found := self._with_more(enough)) is None:
            if enough > 2**60:
                return self.space.no_degrees()
            too_little, enough = enough, 2 * enough
        while enough - too_little > FINEST * most:
            middle = (enough + too_little) / 2
            if nearer := self._with_more(middle):
                enough, found = middle, nearer
            else:
                too_little = middle
        return does_not_fit(self._plan(found), self.request.cluster)

    def _with_more(self, more_bytes: float) -> _BestStages | None:
        """Returns roughly the best plan if every chip had so much more memory."""
        best: _BestStages | None = None
        for part, tables in enumerate(self.parts):
            tables.more_bytes = more_bytes
            found, _ = self._solve(part, QUICK, best.cost_s if best else math.inf)
            if found and (best is None or found.key() < best.key()):
                best = found
        return best


def _without(found: _BestStages) -> Iterator[Allowed]:
    """Yields disjoint parts that make up the space without the degrees found."""
    for index, allowed in enumerate(found.allowed):
        rest = allowed - {found.degrees[index]}
        if rest:
            kept = tuple(frozenset([widths]) for widths in found.degrees[:index])
            yield (*kept, rest, *found.allowed[index + 1 :])
