"""AutoHet's three recoveries (section V-C): who trained, and who goes on.

Node n0 has eight A100, node n1 eight H20. Four groups train, each of two A100 that hold the first
half of the layers and two H20 that hold the second, tensor-parallel both. A rank stands for two
chips here: what a node holds and lacks is the same, and a small machine can run them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heteropp.description.plan import Pipeline, Plan, Replica, Stage
from heteropp.models.llama.model import LlamaModel

GPT3 = {"3B": (32, 2560), "6.7B": (32, 4096), "13B": (40, 5120), "20B": (44, 6144)}
HIDDEN = {"3B": 80, "6.7B": 128, "13B": 160, "20B": 192}  # scaled: about 1/1000 of the bytes
STATE_BYTES = 12  # of a parameter: its value and AdamW's two averages, in float32


def real_state_bytes(name: str) -> int:
    """Returns the bytes of training state of the matrices in the layers of a GPT-3 of full size."""
    layers, hidden = GPT3[name]
    return 12 * layers * hidden**2 * STATE_BYTES


def scaled_model(name: str) -> LlamaModel:
    """Returns a small model with the layers, and so the number of tensors, of a GPT-3.

    Its hidden size is smaller.
    """
    hidden = HIDDEN[name]
    return LlamaModel(
        name=name,
        layers=GPT3[name][0],
        hidden=hidden,
        heads=4,
        kv_heads=4,
        intermediate=hidden * 8 // 3 // 4 * 4,
        vocab=64,
        sequence_length=64,
    )


@dataclass(frozen=True)
class Training:
    """A plan, and where its ranks are."""

    plan: Plan
    nodes: tuple[str, ...]  # by rank


def training(model: LlamaModel, groups: Sequence[Sequence[tuple[str, int]]]) -> Training:
    """A group's stages by their node and tensor-parallel degree; layers in equal parts."""
    pipelines, nodes = [], []
    for group in groups:
        stages = []
        for s, (node, degree) in enumerate(group):
            first, last = (model.layers * turn // len(group) for turn in (s, s + 1))
            ranks = tuple(range(len(nodes), len(nodes) + degree))
            replica = Replica(ranks=ranks, chip=node, batch_share=1)
            stages.append(Stage(layers=(first, last), recompute=False, replicas=(replica,)))
            nodes += [node] * degree
        pipelines.append(Pipeline(micro_batches=1, stages=tuple(stages)))
    plan = Plan(
        model=model,
        global_batch=len(pipelines),
        micro_batch=1,
        schedule="1f1b",
        zero_stage=0,
        pipelines=tuple(pipelines),
    )
    return Training(plan, tuple(nodes))


PAIR = (("n0", 1), ("n1", 1))  # tensor-parallel degrees, of ranks
RANKS_PER_NODE = 4
BEFORE = [PAIR] * 4
AFTER = {
    "A: two of four groups go": [PAIR] * 2,
    "B: node n0 goes": [(("n1", 2),)] * 2,
    "C: nodes n2 and n3 come": [*BEFORE, (("n2", 1), ("n3", 1))],
}
BARS = dict(zip(AFTER, (4.38, 1.49, 3.59), strict=True))
