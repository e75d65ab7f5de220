"""How much of what the chips could compute goes into the model: MFU."""

from __future__ import annotations

import math

from heteropp.description.cluster import Cluster
from heteropp.description.model import Model
from heteropp.models.llama.parameters import model_parameters


def model_flops_per_token(model: Model) -> float:
    """Returns the FLOPs that a token's forward and backward take; recompute does not count.

    They are six for each weight of a matrix that a token is multiplied with, and the products of
    attention with all tokens of its sequence, masked or not (PaLM, appendix B).
    """
    matrices = sum(
        math.prod(parameter.shape)
        for parameter in model_parameters(model)
        if parameter.name.startswith("layers.") and len(parameter.shape) == 2
    )
    head = model.vocab * model.hidden
    attention = 12 * model.layers * model.hidden * model.sequence_length
    return 6.0 * (matrices + head) + attention


def utilization(model: Model, cluster: Cluster, tokens_per_s: float) -> float:
    """Model FLOPs utilization: a share of the peaks of all chips together."""
    peak = sum(cluster.chip(rank).peak_flops(model.dtype) for rank in range(cluster.world_size))
    return tokens_per_s * model_flops_per_token(model) / peak
