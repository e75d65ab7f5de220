"""Sequences in slices over nodes that are far from each other, against the best plan without: plans
of the ablation.

There are fewer sequences than chips. Without slices they are whole, or cut over chips, between
which keys and values then go in every layer; both plans are the default planner's.
"""

from __future__ import annotations

from pathlib import Path

from twins import Scale, write_twin

from heteropp.description.cluster import Cluster, read_cluster
from heteropp.description.plan import Plan
from heteropp.models.llama.model import LlamaModel
from heteropp.search.judge import ask
from heteropp.search.planner import OPTIONS, Request

NODES = [1] * 4  # chips of each
SEQUENCES = 1
MOST_PARTS, MOST_SLICES = 4, 8
WITHOUT, SLICED = "without slices", "slices"
MODEL = LlamaModel(
    name="in-slices",
    layers=8,
    hidden=64,
    heads=4,
    kv_heads=4,
    intermediate=192,
    vocab=256,
    sequence_length=1024,
    attention="fused",
)
SCALE = Scale(computing=1e5, memory=1e2, memory_bandwidth=2e3, links=640, nics=2_000)


def write_cluster(folder: Path, slower: float) -> Path:
    return write_twin(folder, {"a": NODES}, SCALE.slower(slower))


def plans(path: Path) -> dict[str, Plan]:
    """Returns the default planner's plan of each configuration."""
    cluster = read_cluster(path)
    return {WITHOUT: _planned(cluster, 1), SLICED: _planned(cluster, MOST_SLICES)}


def _planned(cluster: Cluster, most_slices: int) -> Plan:
    request = Request(
        cluster=cluster,
        model=MODEL,
        global_batch=SEQUENCES,
        open=frozenset(OPTIONS),
        context_parallel=MOST_PARTS,
        token_slices=most_slices,
    )
    return ask("auto", request, 1).best.plan
