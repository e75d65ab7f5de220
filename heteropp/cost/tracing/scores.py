"""Whether a model's attention keeps its scores, as one run of its blocks told."""

from __future__ import annotations

from heteropp.cost.tracing import cache
from heteropp.models.spec import ModelSpec


def keeps_no_scores(model: ModelSpec) -> bool:
    """Returns what the model itself says, which takes seconds and torch, and is kept on disk."""
    return cache.get(model, "keeps no scores", lambda: model.keeps_no_scores, bool)
