"""Local searches from many starts: first those given, then plans unlike any searched from."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from heteropp.description.plan import Plan
from heteropp.search.auto.climb import climb
from heteropp.search.auto.fitting import try_fitting
from heteropp.search.auto.trials import WORTH_MORE, Trial, Trials

MOST_IN_VAIN = 100  # starts of each way to differ, where the clock is the limit


def climb_all(trials: Trials, starts: Sequence[Trial]) -> None:
    """Climbs from these trials, and from plans that are about as fast as the best.

    All starts get a hasty climb before any gets a thorough one, which may take all of the budget.
    """
    for hasty in (True, False):
        _climb_from(trials, dict.fromkeys(starts), hasty)


@dataclass(frozen=True)
class Restarts:
    """Climbs from the fastest plans that differ from those climbed before in some way, until many
    in turn have found nothing faster. A start that does not fit, or from which it is known where a
    climb ends, counts as one of them.
    """

    unlike: Callable[[Plan], Hashable]  # gives what has to differ
    in_vain: int  # starts in turn, at most
    close: float  # step of a start over that of the best, at most


def _climb_from(trials: Trials, starts: Iterable[Trial], hasty: bool) -> None:
    climbed: list[Plan] = []
    for trial in starts:
        climbed += trial.draft.plan, climb(trial, trials, hasty).draft.plan
    while any(_restart(trials, climbed, restarts, hasty) for restarts in RESTARTS):
        pass


def _restart(trials: Trials, climbed: list[Plan], restarts: Restarts, hasty: bool) -> bool:
    """Climbs from some more plans, and adds these and the plans found to those climbed. Returns
    whether one of them is faster than the best before, by so much that it matters.
    """
    unlike = restarts.unlike
    best_s, known = trials.best_s, set(map(unlike, climbed))
    for _ in range(restarts.in_vain if trials.request.budget_s is None else MOST_IN_VAIN):
        drafts = trials.drafts(restarts.close)
        start = next((draft for draft in drafts if unlike(draft.plan) not in known), None)
        if start is None or trials.budget.spent:
            break
        known.add(unlike(start.plan))
        if found := try_fitting(start, trials, restarts.close * trials.best_s):
            plans = start.plan, found.draft.plan, climb(found, trials, hasty).draft.plan
            climbed += plans
            known |= set(map(unlike, plans))
        if trials.best_s < best_s * (1 - WORTH_MORE):
            return True
    return False


def _kind(plan: Plan) -> Hashable:
    """Returns what a local search seldom changes on its way."""
    depths = tuple((len(pipeline.stages), pipeline.slices) for pipeline in plan.pipelines)
    return plan.schedule, plan.pipelines[0].stages[0].ministages, plan.micro_batch, depths


def _order(plan: Plan) -> Hashable:
    """Returns the kind of a plan, and the chips of each of its stages in order."""
    return _kind(plan), tuple(tuple(s.chips for s in p.stages) for p in plan.pipelines)


def _degrees(plan: Plan) -> Hashable:
    """Returns the order of a plan, and the degrees and recompute of each of its stages."""
    return _order(plan), tuple(
        tuple((s.dp, s.tp, s.cp, s.ep, s.recompute) for s in p.stages) for p in plan.pipelines
    )


# Those come first that lead farthest away. The last ones matter where few plans are near the best.
RESTARTS = (
    Restarts(_kind, in_vain=24, close=1.15),
    Restarts(_order, in_vain=32, close=1.15),
    Restarts(_degrees, in_vain=16, close=1.6),
)
