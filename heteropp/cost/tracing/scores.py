"""What a model's attention is like in its kernel, as one run of its blocks told."""

from __future__ import annotations

from heteropp.cost.tracing import cache
from heteropp.models.spec import ModelSpec


def keeps_no_scores(model: ModelSpec) -> bool:
    """Returns what the model itself says, which takes seconds and torch, and is kept on disk."""
    return cache.get(model, "keeps no scores", lambda: model.keeps_no_scores, bool)


def kernel_takes_parts(model: ModelSpec) -> bool:
    """Returns whether chips attend to parts of sequences as the model does: in fused attention
    through a window or with a soft cap they have no kernel for it.
    """

    def found() -> bool:
        return not (model.fuses_windows or model.caps_fused_scores)

    return cache.get(model, "kernel takes parts of sequences", found, bool)
