"""The best Megatron-style uniform plan, the baseline: every stage alike, whatever its chips.

All stages have the same tensor- and data-parallel degrees, recompute or not, and the same number
of layers, but for one more on some neighbours where the layers do not divide. A stage's chips are
of one type, as with the other planners of one pipeline. Every such plan is costed, so the best is
the optimum of this space.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from heteropp.description.plan import Plan
from heteropp.search.costs import Costs, evaluate
from heteropp.search.planner import Candidate, Request, Result, SearchError, does_not_fit
from heteropp.search.space import BatchCut, Degrees, Space, StageChoice
from heteropp.search.tables import check_schedule

RUNNERS_UP = 3


@dataclass(frozen=True, order=True)
class Uniform:
    """A uniform plan: its cost, how far it overruns memory, and what all stages do."""

    lacking_bytes: float
    cost_s: float
    dp: int
    tp: int
    recompute: bool
    longer_from: int  # the stage from which on stages hold a layer more, as far as there are any


def search(request: Request) -> Result:
    """The best uniform plan. Raises SearchError, or DoesNotFitError where none fits."""
    check_schedule("uniform", request)
    usual = replace(request, stage_degrees=False, context_parallel=None, expert_parallel=None)
    return _UniformSearch(Space(usual)).run()


class _UniformSearch:
    def __init__(self, space: Space) -> None:
        self.space = space
        self.costs = Costs(space)
        self.shares = {share.replicas: share for share in space.shares}

    def run(self) -> Result:
        plans = sorted(self._every())
        if not plans:
            raise SearchError(
                "no uniform plan uses all chips: every chip type's count must be a multiple of "
                "tp x dp, with no more stages in all than layers"
            )
        best = plans[0]
        if best.lacking_bytes > 0:
            raise does_not_fit(self._plan(best), self.space.request.cluster)
        unlike: dict[tuple, Uniform] = {}
        for plan in plans:
            if not plan.lacking_bytes:
                unlike.setdefault((plan.dp, plan.tp, plan.recompute), plan)
        few = list(unlike.values())[: 1 + RUNNERS_UP]
        candidates = [Candidate(self._plan(plan), plan.cost_s) for plan in few]
        return Result("uniform", candidates[0], candidates[1:], best.cost_s, len(plans))

    def _every(self) -> Iterator[Uniform]:
        common = set.intersection(*(set(chips.tp_degrees) for chips in self.space.types))
        layers = self.space.model.layers
        for share in self.shares.values():
            for tp in sorted(common):
                degrees = Degrees(tp, share.replicas)
                stages, rest = divmod(sum(c.chips for c in self.space.types), degrees.chips)
                mixed = any(chips.chips % degrees.chips for chips in self.space.types)
                if rest or mixed or stages > layers:
                    continue
                for recompute in (False, True):
                    for longer_from in sorted({0, stages - layers % stages} - {stages}):
                        yield self._evaluate(share, degrees, recompute, longer_from)

    def _evaluate(
        self, share: BatchCut, degrees: Degrees, recompute: bool, longer_from: int
    ) -> Uniform:
        """Returns a plan's seconds by section 4.3.2, and the most bytes that a chip lacks."""
        stages = self._stages(degrees, recompute, longer_from)
        cost_s, lacking_bytes = evaluate(self.costs, share, stages)
        return Uniform(lacking_bytes, cost_s, degrees.dp, degrees.tp, recompute, longer_from)

    def _stages(self, degrees: Degrees, recompute: bool, longer_from: int) -> list[StageChoice]:
        held = [
            index
            for index, chips in enumerate(self.space.types)
            for _ in range(chips.chips // degrees.chips)
        ]
        size, longer = divmod(self.space.model.layers, len(held))
        return [
            StageChoice(
                index, degrees, recompute, size + (longer_from <= at < longer_from + longer)
            )
            for at, index in enumerate(held)
        ]

    def _plan(self, plan: Uniform) -> Plan:
        stages = self._stages(Degrees(plan.tp, plan.dp), plan.recompute, plan.longer_from)
        return self.space.plan(self.shares[plan.dp], stages)
