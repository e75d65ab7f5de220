"""Step 6: two processes share the GPU by each degree of parallelism, and train what one does."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evidence import row

from gpu_check.part import Found, Part
from gpu_check.processes import run, run_together
from gpu_check.training import metrics, ranks_of, write_cluster

if TYPE_CHECKING:
    from heteropp.description.plan import Plan
    from heteropp.models.spec import ModelSpec

STEPS, GLOBAL_BATCH, MICRO_BATCH = 8, 8, 2
BAR = 1.5  # percent, of losses, as ditorch-align asks for
CORES_A_RUN = 4  # a run is two processes
# on a GPU FlashAttention takes 16 bits alone; the emulated chip that rehearses takes all
LLAMA = """\
name            = "llama"
layers          = 4
hidden          = {hidden}
heads           = 8
kv_heads        = 4
intermediate    = {intermediate}
vocab           = 256
sequence_length = {sequence_length}
dtype           = "bfloat16"
attention       = "fused"
"""
SIZES = {"hidden": 512, "intermediate": 1408, "sequence_length": 1024}
REHEARSED = {"hidden": 128, "intermediate": 256, "sequence_length": 64}
EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Shared:
    """How two ranks hold the one stage of a plan."""

    name: str
    tp: int = 1
    token_shares: tuple[int, ...] | None = None
    expert_shares: tuple[int, ...] | None = None


def found(part: Part, folder: Path) -> Found:
    from heteropp.api.given import the_model

    sizes = REHEARSED if part.is_rehearsed else SIZES
    (folder / "llama.toml").write_text(LLAMA.format(**sizes))
    (folder / "experts").mkdir()
    (folder / "experts" / "config.json").write_text(json.dumps(EXPERTS))
    length = sizes["sequence_length"]
    # read before any thread is, as transformers cannot be imported by several at once
    llama = the_model(str(folder / "llama.toml"))
    experts = the_model(str(folder / "experts"), EXPERTS["max_position_embeddings"])
    unequal = 5 * length // 8, 3 * length // 8
    ways = {
        llama: (
            Shared("data parallel"),
            Shared("tensor parallel", tp=2),
            Shared("context parallel, unequal", token_shares=unequal),
        ),
        experts: (Shared("expert parallel, unequal", expert_shares=(5, 3)),),
    }
    rows = []
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // CORES_A_RUN)) as pool:
        train = partial(_train, part, folder)
        runs = [
            (pool.submit(train, model, None), [(w, pool.submit(train, model, w)) for w in shared])
            for model, shared in ways.items()
        ]
        for alone, others in runs:
            for way, together in others:
                rows += _rows(way.name, together.result(), alone.result())
    return Found(rows, [])


def _rows(name: str, steps: Sequence[dict], alone: Sequence[dict]) -> list[dict[str, Any]]:
    """The losses, and the gradients' norms, which AdamW would forgive for being too large."""
    return [
        row(
            f"two processes of one GPU, {name}: mean relative error of {what}",
            "%",
            100
            * statistics.mean(
                abs(step[key] / other[key] - 1) for step, other in zip(steps, alone, strict=True)
            ),
            bar=BAR,
            peer_name="one process of the GPU",
        )
        for what, key in (("the losses", "loss"), ("the gradients' norms", "gradient_norm"))
    ]


def _train(part: Part, folder: Path, model: ModelSpec, way: Shared | None) -> list[dict]:
    """Trains by two ranks, or by one where no way is given; returns what each step measured."""
    from heteropp.description.plan import write_plan

    name = f"{model.name}-{way.name.split(',')[0].replace(' ', '-') if way else 'alone'}"
    cluster = write_cluster(folder, name, part.chip, chips=2 if way else 1)
    output, plan = folder / name, folder / f"{name}.json"
    write_plan(_plan(part, model, way), plan)
    options = "--cluster", cluster, "--plan", plan, "--steps", STEPS, "--output", output
    if way is None:
        run("heteropp.cli.train", *options, environment=part.environment)
    else:
        run_together("heteropp.cli.train", *options, environments=ranks_of([part.environment] * 2))
    return metrics(output)


def _plan(part: Part, model: ModelSpec, way: Shared | None) -> Plan:
    from heteropp.description.plan import Pipeline, Plan, Replica, Stage

    way, count = (way, 2) if way else (Shared("alone"), 1)
    together = way.tp > 1 or way.token_shares is not None
    groups = [tuple(range(count))] if together else [(rank,) for rank in range(count)]
    replicas = tuple(
        Replica(
            ranks=ranks,
            chip=part.chip,
            batch_share=MICRO_BATCH // len(groups),
            token_shares=way.token_shares,
        )
        for ranks in groups
    )
    layers = 0, model.layers
    stage = Stage(
        layers=layers, recompute=False, replicas=replicas, expert_shares=way.expert_shares
    )
    return Plan(
        model=model,
        global_batch=GLOBAL_BATCH,
        micro_batch=MICRO_BATCH,
        schedule="1f1b",
        zero_stage=1,
        pipelines=(Pipeline(micro_batches=GLOBAL_BATCH // MICRO_BATCH, stages=(stage,)),),
    )
