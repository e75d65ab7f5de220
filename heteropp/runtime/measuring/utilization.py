"""How much of what the chips could compute goes into the model: MFU."""

from __future__ import annotations

from heteropp.description.cluster import Cluster
from heteropp.models.spec import ModelSpec


def utilization(model: ModelSpec, cluster: Cluster, tokens_per_s: float) -> float:
    """Model FLOPs utilization: a share of the peaks of all chips together."""
    peak = sum(cluster.chip(rank).peak_flops(model.dtype) for rank in range(cluster.world_size))
    return tokens_per_s * model.flops_per_token() / peak
