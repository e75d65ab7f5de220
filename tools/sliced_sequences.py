"""Sequences in slices over nodes that are far from each other, against the best plan without: rows
of the ablation.

There are fewer sequences than chips. Without slices they are whole, or cut over chips, between
which keys and values then go in every layer; both plans are the default planner's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from evidence import Row
from twins import Scale, write_twin

from dicomm.bench.judging import row_over_rounds
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


def rows(
    gains: Sequence[float],
    step_s: Mapping[str, Sequence[float | None]],
    simulated_s: Mapping[str, float],
) -> list[Row]:
    """How many times as many tokens per second, and what simulated steps are off the measured."""
    result = [
        row_over_rounds("slices, tokens/s to those of the best plan without", "x", gains,
            bar=1.2, better="higher")
    ]  # fmt: skip
    for name, expected_s in simulated_s.items():
        errors = [100 * abs(expected_s / each_s - 1) for each_s in step_s[name] if each_s]
        result.append(row_over_rounds(f"{name}, simulated step off", "%", errors, bar=2.0))
    return result
