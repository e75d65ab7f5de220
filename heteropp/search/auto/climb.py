"""Local search by the simulated step: the first neighbour that is faster, until none is."""

from __future__ import annotations

import math

from heteropp.search.auto.moves import SLACK, neighbours
from heteropp.search.auto.trials import Trial, Trials

LEAST_GAIN = 1e-4  # relative; less is not worth another round


def climb(trial: Trial, trials: Trials) -> Trial:
    """Returns a trial of which no neighbour is faster, or the best one when the budget ends.

    The kind of neighbour that has just helped is asked again first.
    """
    best, first = trial, 0
    while not trials.budget.spent:
        kinds = neighbours(best.draft, trials.freedom)
        order = [*range(first, len(kinds)), *range(first)]
        for kind in order:
            cutoff_s = math.inf if kind == SLACK else best.step_s * (1 - LEAST_GAIN)
            better = next(
                (
                    found
                    for draft in kinds[kind]
                    if (found := trials.try_(draft, cutoff_s))
                    and found.step_s < best.step_s * (1 - LEAST_GAIN)
                ),
                None,
            )
            if better:
                best, first = better, kind
                break
        else:
            break
    return best
