"""Local search by the simulated step: the first neighbour that is faster, until none is."""

from __future__ import annotations

import math
from collections.abc import Iterable

from heteropp.search.auto.moves import SLACK, neighbours
from heteropp.search.auto.trials import Draft, Trial, Trials

LEAST_GAIN = 1e-4  # relative; less is not worth another round
BEHIND = 1.06  # times the best step: a plan that takes longer is behind
PATIENCE = 20  # simulations of one kind of neighbour, in vain, in a hasty climb that is behind


def climb(trial: Trial, trials: Trials, hasty: bool) -> Trial:
    """Returns the last of a row of trials, each a faster neighbour of the one before: no neighbour
    of that is faster, as far as they were tried, or the budget is spent.

    The kind of neighbour that has just helped is asked again first. hasty: few neighbours of each
    kind are tried while this is behind the best plan known.
    """
    best, first = trial, 0
    while not trials.budget.spent:
        kinds = neighbours(best.draft, trials.freedom)
        order = [*range(first, len(kinds)), *range(first)]
        most = PATIENCE if hasty and best.step_s > BEHIND * trials.best_s else math.inf
        for kind in order:
            cutoff_s = math.inf if kind == SLACK else best.step_s * (1 - LEAST_GAIN)
            if better := _faster(kinds[kind], best, trials, cutoff_s, most):
                best, first = better, kind
                break
        else:
            break
    return best


def _faster(
    drafts: Iterable[Draft], best: Trial, trials: Trials, cutoff_s: float, most: float
) -> Trial | None:
    """Returns the trial of the first draft that is faster than the best.

    most: simulations in vain after which no more drafts are tried.
    """
    begun_at = trials.simulated
    for draft in drafts:
        found = trials.try_(draft, cutoff_s)
        if found and found.step_s < best.step_s * (1 - LEAST_GAIN):
            return found
        if trials.simulated - begun_at >= most:
            break
    return None
