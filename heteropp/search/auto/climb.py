"""Local search by the simulated step: the first neighbour that is faster, until none is."""

from __future__ import annotations

import math
from collections.abc import Iterable

from heteropp.search.auto.moves import SLACK, neighbours
from heteropp.search.auto.trials import Draft, Trial, Trials

LEAST_GAIN = 1e-4  # relative; less is not worth another round
PATIENCE = 20  # neighbours of a kind that a hasty climb simulates in vain, behind the best plan
BEHIND = 1.06  # times the best plan's step: where it is


def climb(trial: Trial, trials: Trials, hasty: bool) -> Trial:
    """Returns a trial of which no neighbour is faster, or the best one when the budget ends.

    The kind of neighbour that has just helped is asked again first. hasty: try few neighbours of
    each kind while this is behind the best plan known.
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
    """Returns the first draft that is faster, of those before so many were simulated in vain."""
    begun_at = trials.simulated
    for draft in drafts:
        found = trials.try_(draft, cutoff_s)
        if found and found.step_s < best.step_s * (1 - LEAST_GAIN):
            return found
        if trials.simulated - begun_at >= most:
            break
    return None
