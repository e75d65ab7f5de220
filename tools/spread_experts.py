"""Experts that lie over two unlike chips, by speed and in equal numbers: plans of the ablation.

Both chips are replicas of one stage, each with sequences by its speed in either case, so that only
the experts make the difference.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from heteropp.cost.expert_shares import expert_shares
from heteropp.description.cluster import Cluster
from heteropp.description.plan import Pipeline, Plan, Replica, Stage
from heteropp.models.hugging_face.reading import read
from heteropp.models.spec import ModelSpec

SPEEDS = (1.0, 2.0)
MICRO_BATCHES = 2
BATCH_SHARES = (1, 2)  # sequences of a micro-batch
EQUAL, BY_SPEED = "equal experts", "experts by speed"


@cache
def model() -> ModelSpec:
    """Two layers of six experts, to all of which each token goes: no router has a part in it."""
    values = {
        "model_type": "qwen3_moe",
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 256,
        "max_position_embeddings": 128,
        "num_experts": 6,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 512,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    }
    return read(values, "spread-over-chips", sequence_length=128)


def plans(cluster: Cluster) -> dict[str, Plan]:
    """Returns the plan of each configuration on two chips of unlike speeds, slower first."""
    replicas = tuple(
        Replica(ranks=(rank,), chip=cluster.node(rank).chip_name, batch_share=share)
        for rank, share in enumerate(BATCH_SHARES)
    )
    stage = Stage(layers=(0, model().layers), recompute=False, replicas=replicas)
    whole = Plan(
        model=model(),
        global_batch=MICRO_BATCHES * stage.micro_batch,
        micro_batch=stage.micro_batch,
        schedule="1f1b",
        zero_stage=0,
        pipelines=(Pipeline(micro_batches=MICRO_BATCHES, stages=(stage,)),),
    )
    half = model().expert_count // 2
    shares = {EQUAL: (half, half), BY_SPEED: expert_shares(model(), SPEEDS)}
    return {
        name: replace(
            whole,
            pipelines=(replace(whole.pipelines[0], stages=(replace(stage, expert_shares=each),)),),
        )
        for name, each in shares.items()
    }
