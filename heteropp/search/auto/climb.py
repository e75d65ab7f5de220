"""Local search by the simulated step: the first neighbour that is faster, until none is."""

from __future__ import annotations

from heteropp.search.auto.moves import neighbours
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
            better = next(
                (
                    found
                    for draft in kinds[kind]
                    if (found := trials.try_(draft, best.step_s * (1 - LEAST_GAIN)))
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
