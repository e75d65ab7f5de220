"""Recompute for drafts that do not fit in memory."""

from __future__ import annotations

import math
from dataclasses import replace

from heteropp.description.plan import Stage
from heteropp.search.auto.changed import with_one
from heteropp.search.auto.trials import Draft, Trial, Trials


def try_fitting(draft: Draft, trials: Trials, cutoff_s: float = math.inf) -> Trial | None:
    """Simulates a draft. While it does not fit, the stage that lacks most memory recomputes
    attention, then everything. Returns None if it still does not fit, or takes the cutoff at least.
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
    """Returns a stage that keeps fewer activations, or None where it recomputes them all already.

    selective: whether attention alone may be computed again.
    """
    if stage.recompute:
        return None
    attention = selective and not stage.selective_recompute
    return replace(
        stage,
        recompute=not attention,
        selective_recompute=attention,
        offload=stage.offload and attention,
    )
