"""A plan as a FlagScale training file (YAML): a process mesh for each stage, of its own degrees."""

from __future__ import annotations

import json
from collections import Counter
from itertools import groupby
from typing import Any

from heteropp.description.outline import together
from heteropp.description.plan import Plan, Stage
from heteropp.frameworks.file import (
    ExportError,
    FrameworkFile,
    Replacement,
    heading,
    rank_lines,
    spans,
)
from heteropp.frameworks.megatron import recompute_settings
from heteropp.frameworks.megatron_sizes import model_settings
from heteropp.frameworks.one_pipeline import sequence_parallel, single_pipeline

USE = (
    "Use: as conf/train/NAME.yaml of an experiment, with its data section. The host file gives "
    "each machine the type that hetero_device_types names; "
    "hetero_current_device_type is each machine's own."
)
# of recompute_granularity_per_stage_micro_batch, whose rows are stages, micro-batches, flag
RECOMPUTED, KEPT = 1, 0


def to_flagscale(plan: Plan) -> FrameworkFile:
    """Returns the `train` file of an experiment. Raises ExportError."""
    single = single_pipeline(plan)
    stages = single.stages
    found = list(single.replacements)
    _check(plan, stages)
    if plan.schedule != "1f1b" or any(stage.ministages > 1 for stage in stages):
        found.append(
            Replacement(f"schedule {plan.schedule}", "1F1B, the only one over unlike meshes")
        )
    micro_batch, micro_batches = _batches(plan, stages, found)
    sizes, lacking = model_settings(plan.model)
    found += lacking
    labels = _labels(stages)
    model: dict[str, Any] = {_key(name): value for name, value in sizes.items()}
    precision = {key: model.pop(key) for key in ("bf16", "fp16") if key in model}
    model |= {
        "micro_batch_size": micro_batch,
        "global_batch_size": micro_batch * stages[0].dp * micro_batches,
    }
    content = {
        "system": _system(plan, stages, labels, micro_batches, found) | {"precision": precision},
        "model": model,
    }
    lines = heading(plan, USE, found)
    order = [
        (label, tuple(rank for replica in stage.replicas for rank in replica.ranks))
        for stage, label in zip(stages, labels, strict=True)
    ]
    text = "\n".join([*lines, *rank_lines(order), *_yaml(content), ""])
    return FrameworkFile(text, tuple(found))


def _check(plan: Plan, stages: tuple[Stage, ...]) -> None:
    first, last = stages[0], stages[-1]
    if plan.model.tied and first.tp != last.tp:
        raise ExportError(
            f"embedding and head are tied and lie on stages of tp {first.tp} and {last.tp}; "
            "FlagScale expects the same tp of both"
        )
    if plan.model.tied and first.dp % last.dp and last.dp % first.dp:
        raise ExportError(
            f"embedding and head are tied and lie on stages of dp {first.dp} and {last.dp}; "
            "FlagScale expects that one divides the other"
        )


def _batches(plan: Plan, stages: tuple[Stage, ...], found: list[Replacement]) -> tuple[int, int]:
    """Returns the sequences of a replica of the first stage, and a step's micro-batches.

    Every stage's dp has to divide the micro-batch of all replicas.
    """
    first = stages[0].dp
    whole = max(stage.micro_batch for stage in stages)
    sizes = [
        size
        for size in range(first, max(whole, plan.global_batch) + 1, first)
        if not plan.global_batch % size and not any(size % stage.dp for stage in stages)
    ]
    if not sizes:
        degrees = ", ".join(str(stage.dp) for stage in stages)
        raise ExportError(
            f"no micro-batch divides the global batch of {plan.global_batch} sequences and is "
            f"divided by the stages' dp {degrees}, which FlagScale expects"
        )
    size = max((size for size in sizes if size <= whole), default=sizes[0])
    if size != plan.micro_batch:
        found.append(Replacement(f"micro-batches of {plan.micro_batch} sequences", str(size)))
    return size // first, plan.global_batch // size


def _labels(stages: tuple[Stage, ...]) -> list[str]:
    """Returns a device type for each stage.

    FlagScale orders ranks by type, each where it first stands: a type that comes again after
    another needs a second name.
    """
    labels: list[str] = []
    runs: Counter[str] = Counter()
    for chips, run in groupby(together(s.chips) for s in stages):
        runs[chips] += 1
        name = chips.replace(" + ", "-")
        labels += [f"{name}_{runs[chips]}" if runs[chips] > 1 else name] * len(list(run))
    return labels


def _system(
    plan: Plan,
    stages: tuple[Stage, ...],
    labels: list[str],
    micro_batches: int,
    found: list[Replacement],
) -> dict[str, Any]:
    system: dict[str, Any] = {
        "tensor_model_parallel_size": stages[0].tp,
        "pipeline_model_parallel_size": len(stages),
        "sequence_parallel": sequence_parallel(stages, found),
        "use_distributed_optimizer": plan.zero_stage > 0,
    }
    if plan.zero_stage == 2:
        found.append(Replacement("ZeRO stage 2", "the distributed optimizer, which is stage 1"))
    if plan.optimizer == "muon":
        found.append(Replacement("optimizer muon", "the experiment's own optimizer section"))
    if len({(stage.tp, stage.dp) for stage in stages}) > 1:
        found.append(
            Replacement(f"resharding {plan.resharding}", "FlagScale's own messages between meshes")
        )
    system["hetero"] = {
        "enable_hetero": True,
        "hetero_use_cpu_communication": False,
        "hetero_pipeline_layer_split": [stage.layer_count for stage in stages],
        # tp, cp, ep, dp, pp of each mesh
        "hetero_process_meshes": [n for s in stages for n in (s.tp, 1, 1, s.dp, 1)],
        "hetero_device_types": labels,
        "hetero_current_device_type": labels[0],
        "standalone_embedding_stage": False,
    }
    if plan.model.tied and stages[0].dp != stages[-1].dp:
        system["hetero"]["use_partial_reduce_for_shared_embedding"] = True
    if recompute := _recompute(stages, micro_batches, found):
        system["recompute"] = recompute
    return system


def _recompute(
    stages: tuple[Stage, ...], micro_batches: int, found: list[Replacement]
) -> dict[str, Any]:
    full = [stage.recompute for stage in stages]
    selective = [s for s, stage in enumerate(stages) if stage.selective_recompute]
    if selective and (any(full) or len(selective) < len(stages)):
        by = "none" if any(full) else "selective recompute on every stage"
        found.append(Replacement(f"selective recompute on stages {spans(selective)}", by))
    kind = "full" if any(full) else "selective" if selective else None
    settings: dict[str, Any] = {
        _key(name): value for name, value in recompute_settings(kind).items()
    }
    if any(full) and not all(full):
        settings["recompute_granularity_per_stage_micro_batch"] = [
            [1, micro_batches, RECOMPUTED if one else KEPT] for one in full
        ]
    return settings


def _key(argument: str) -> str:
    return argument.replace("-", "_")


def _yaml(content: dict[str, Any], depth: int = 0) -> list[str]:
    """Returns nested tables as YAML, whose scalars and lists may be JSON's."""
    lines = []
    for key, value in content.items():
        indent = "  " * depth
        if isinstance(value, dict):
            lines += [f"{indent}{key}:", *_yaml(value, depth + 1)] if value else []
        elif isinstance(value, list) and value and isinstance(value[0], list):
            lines += [f"{indent}{key}:", *(f"{indent}  - {json.dumps(row)}" for row in value)]
        else:
            lines.append(f"{indent}{key}: {json.dumps(value)}")
    return lines
