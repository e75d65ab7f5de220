"""Step 6: two processes share the GPU by each degree of parallelism, and train what one does."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evidence import row

from gpu_check.part import Found, Part
from gpu_check.processes import run, run_together
from gpu_check.training import metrics, ranks_of, write_cluster

STEPS, GLOBAL_BATCH, MICRO_BATCH = 8, 8, 2
BAR = 1.5  # percent, of losses, as ditorch-align asks for
CORES_A_RUN = 4  # a run is two processes
# on a GPU FlashAttention takes 16 bits alone; the emulated chip that rehearses takes all
LLAMA = """\
name            = "shared"
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
EXPERTS = {
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
    sizes = REHEARSED if part.is_rehearsed else SIZES
    llama = folder / "llama.toml"
    llama.write_text(LLAMA.format(**sizes))
    experts = folder / "experts"
    experts.mkdir()
    (experts / "config.json").write_text(json.dumps(EXPERTS))
    length = sizes["sequence_length"]
    ways = {
        llama: (
            Shared("data parallel"),
            Shared("tensor parallel", tp=2),
            Shared("context parallel, unequal", token_shares=(5 * length // 8, 3 * length // 8)),
        ),
        experts: (Shared("expert parallel, unequal", expert_shares=(5, 3)),),
    }
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // CORES_A_RUN)) as pool:
        runs = {
            model: [pool.submit(_train, part, model, way) for way in (None, *shared)]
            for model, shared in ways.items()
        }
    rows = []
    for model, (alone, *others) in runs.items():
        for way, together in zip(ways[model], others, strict=True):
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


def _train(part: Part, model: Path, way: Shared | None) -> list[dict]:
    """Trains by two ranks, or by one where no way is given; returns what each step measured."""
    name = f"{model.stem}-{way.name.split(',')[0].replace(' ', '-') if way else 'alone'}"
    cluster = write_cluster(model.parent, name, part.chip, chips=2 if way else 1)
    output, plan = (model.parent / f"{name}{suffix}" for suffix in ("", ".json"))
    _write_plan(part, model, way, plan)
    options = "--cluster", cluster, "--plan", plan, "--steps", STEPS, "--output", output
    if way is None:
        run("heteropp.cli.train", *options, environment=part.environment)
    else:
        run_together("heteropp.cli.train", *options, environments=ranks_of([part.environment] * 2))
    return metrics(output)


def _write_plan(part: Part, model: Path, way: Shared | None, path: Path) -> None:
    from heteropp.api.given import the_model
    from heteropp.description.plan import Pipeline, Plan, Replica, Stage, write_plan

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
    spec = the_model(str(model), 128 if model.is_dir() else None)
    stage = Stage(
        layers=(0, spec.layers), recompute=False, replicas=replicas, expert_shares=way.expert_shares
    )
    pipeline = Pipeline(micro_batches=GLOBAL_BATCH // MICRO_BATCH, stages=(stage,))
    write_plan(
        Plan(
            model=spec,
            global_batch=GLOBAL_BATCH,
            micro_batch=MICRO_BATCH,
            schedule="1f1b",
            zero_stage=1,
            pipelines=(pipeline,),
        ),
        path,
    )
