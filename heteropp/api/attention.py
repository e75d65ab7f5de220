"""How a model attends where nobody says: in one kernel, where every chip has one.

Such a kernel keeps no scores. What is chosen stands in the plan.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from heteropp.api.given import AnyModel
from heteropp.cost.tracing.scores import keeps_no_scores
from heteropp.description.cluster import Cluster
from heteropp.description.files import read_toml
from heteropp.description.presets import model_path
from heteropp.models.spec import ModelSpec


def says_attention(model: AnyModel) -> bool:
    """Returns whether a model says how it attends, in whatever form it is given.

    Model files may; a Hugging Face folder cannot, and a spec always does. Raises FileError.
    """
    if not isinstance(model, str | Path):
        return isinstance(model, ModelSpec)
    if ".py:" in str(model) or (path := model_path(model)).suffix != ".toml":
        return False
    return "attention" in read_toml(path, dict)


def with_usual_attention(
    model: ModelSpec, cluster: Cluster, measured: ModelSpec | None = None
) -> ModelSpec:
    """Returns a model with fused attention where all of the cluster's chips have it, else as it is.

    A model some of whose blocks keep their scores in any case stays as it is, too. measured: of
    which chips' times are known; it then attends as that does.
    """
    if not hasattr(model, "attention"):
        return model
    if measured is not None:
        attention = getattr(measured, "attention", model.attention)
        return replace(model, attention=attention)  # type: ignore[call-arg]
    if not all(node.chip.fuses_attention for node in cluster.nodes):
        return model
    fused = replace(model, attention="fused")  # type: ignore[call-arg]
    return fused if keeps_no_scores(fused) else model
