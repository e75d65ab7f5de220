"""Drafts that memory has no room for compute activations again, until it has."""

from __future__ import annotations

import math
from dataclasses import replace

from heteropp.description.plan import Stage
from heteropp.search.auto.changed import with_one
from heteropp.search.auto.trials import Draft, Trial, Trials


def try_fitting(draft: Draft, trials: Trials, cutoff_s: float = math.inf) -> Trial | None:
    """Returns a draft simulated, whose stages compute as much again as they must to fit: the one
    that lacks most memory first attention alone, then all. None where that does not help, or is as
    slow as the cutoff.
    """
    found = trials.try_(draft, cutoff_s)
    while found is None and (place := trials.lacking.get(draft)):
        p, s = place
        smaller = _smaller(draft.plan.pipelines[p].stages[s], trials.freedom.selective_recompute)
        if smaller is None:
            return None
        draft = replace(draft, plan=with_one(draft.plan, p, s, smaller))
        found = trials.try_(draft, cutoff_s)
    return found


def _smaller(stage: Stage, selective: bool) -> Stage | None:
    """Returns a stage that keeps fewer activations, or None where it keeps none already.

    selective: whether attention alone may be computed again.
    """
    if stage.recompute or stage.offload:
        return None
    attention = selective and not stage.selective_recompute
    return replace(stage, recompute=not attention, selective_recompute=attention)
