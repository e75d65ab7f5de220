"""Local search by the simulated step: the first neighbour that is faster, until none is."""

from __future__ import annotations

import math
from collections.abc import Iterable

from heteropp.search.auto.fitting import try_fitting
from heteropp.search.auto.moves import SLACK, neighbours
from heteropp.search.auto.trials import Draft, Trial, Trials

LEAST_GAIN = 1e-4  # relative; less is not worth another round
BEHIND = 1.06  # times the best step: a plan that takes longer is behind
PATIENCE = 20  # simulations of one kind of neighbour, in vain, in a hasty climb that is behind


def climb(trial: Trial, trials: Trials, hasty: bool) -> Trial:
    """Returns the last of a row of trials, each a faster neighbour of the one before: no neighbour
    of that is faster, as far as they were tried, or the budget is spent.

    Where a climb has been before that left out no neighbour from there on, this one ends as that
    did. The kind of neighbour that has just helped is asked again first. hasty: few neighbours of
    each kind are tried while this is behind the best plan known.
    """
    best, first = trial, 0
    passed = [trial.draft]  # since a neighbour was last left out
    while not trials.budget.spent and best.draft not in trials.optima:
        most = PATIENCE if hasty and best.step_s > BEHIND * trials.best_s else math.inf
        better, first, left_out = _next(best, first, trials, most)
        if left_out:
            passed = []
        if better:
            best = better
            passed.append(best.draft)
        elif left_out or trials.budget.spent:
            return best
        else:
            trials.optima[best.draft] = best
    if optimum := trials.optima.get(best.draft):
        trials.optima |= dict.fromkeys(passed, optimum)
        return optimum
    return best


def _next(best: Trial, first: int, trials: Trials, most: float) -> tuple[Trial | None, int, bool]:
    """Returns a faster neighbour, or None, the kind that was asked last, and whether a neighbour
    was left out that might have been faster. Once the budget is spent no other is asked for.

    first: the kind that is asked first. most: simulations in vain of each kind.
    """
    kinds = neighbours(best.draft, trials.freedom)
    any_left_out = False
    for kind in (*range(first, len(kinds)), *range(first)):
        cutoff_s = math.inf if kind == SLACK else best.step_s * (1 - LEAST_GAIN)
        better, left_out = _faster(kinds[kind], best, trials, cutoff_s, most)
        any_left_out = any_left_out or left_out
        if better or trials.budget.spent:
            break
    return better, kind, any_left_out


def _faster(
    drafts: Iterable[Draft], best: Trial, trials: Trials, cutoff_s: float, most: float
) -> tuple[Trial | None, bool]:
    """Returns the trial of the first draft that is faster than the best, or None, and whether
    drafts were left out as so many simulations had been in vain, or the budget was spent.
    """
    begun_at = trials.simulated
    for draft in drafts:
        if trials.budget.spent:
            return None, True
        found = try_fitting(draft, trials, cutoff_s)
        if found and found.step_s < best.step_s * (1 - LEAST_GAIN):
            return found, False
        if trials.simulated - begun_at >= most:
            return None, True
    return None, False
