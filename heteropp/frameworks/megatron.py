"""A plan as Megatron-LM's command-line arguments (of 0.14 and newer), in a bash array."""

from __future__ import annotations

import shlex
from itertools import pairwise

from heteropp.description.plan import Plan
from heteropp.description.schedules import Schedule
from heteropp.frameworks.file import FrameworkFile, Replacement, heading, rank_lines
from heteropp.frameworks.megatron_sizes import Setting, model_settings
from heteropp.frameworks.uniform import UniformJob, uniform

SCHEDULES: dict[Schedule, str] = {"1f1b": "1F1B", "interleaved-1f1b": "interleaved 1F1B"}
USE = (
    'Use: source this file; torchrun ... pretrain_gpt.py "${PLAN_ARGUMENTS[@]}" and your '
    "arguments of data, tokenizer, optimizer and checkpoints."
)


def to_megatron(plan: Plan) -> FrameworkFile:
    """Returns a bash file that defines PLAN_ARGUMENTS. Raises ExportError."""
    job = uniform(plan, SCHEDULES)
    sizes, lacking = model_settings(plan.model)
    found = [*job.replacements, *lacking]
    settings = sizes | _job_settings(plan, job, found)
    lines = [*heading(plan, USE, found), *rank_lines(job.ranks), "", "PLAN_ARGUMENTS=("]
    lines += [f"  {_argument(name, value)}" for name, value in settings.items()]
    return FrameworkFile("\n".join([*lines, ")", ""]), tuple(found))


def _job_settings(plan: Plan, job: UniformJob, found: list[Replacement]) -> dict[str, Setting]:
    settings: dict[str, Setting] = {
        "tensor-model-parallel-size": job.tp,
        "pipeline-model-parallel-size": job.pp,
        "micro-batch-size": job.micro_batch,
        "global-batch-size": job.global_batch,
    }
    if job.pp > 1:
        settings["pipeline-model-parallel-layout"] = layout(_chunks(job, found))
    if job.sequence_parallel:
        settings["sequence-parallel"] = True
    if plan.optimizer == "muon":  # which shards its state in another way than the others
        settings["optimizer"] = "dist_muon" if plan.zero_stage else "muon"
    elif plan.zero_stage:
        settings["use-distributed-optimizer"] = True
    if plan.zero_stage == 2:
        found.append(Replacement("ZeRO stage 2", "the distributed optimizer, which is stage 1"))
    settings |= recompute_settings(job.recompute)
    return settings


def _chunks(job: UniformJob, found: list[Replacement]) -> list[tuple[int, int]]:
    """Megatron interleaves groups of as many micro-batches as there are stages."""
    chunks = list(job.chunks)
    if len(chunks) > job.pp and job.micro_batches % job.pp:
        found.append(
            Replacement(
                f"interleaved 1F1B with {job.micro_batches} micro-batches over {job.pp} stages",
                "1F1B: Megatron needs a multiple of the number of stages",
            )
        )
        counts = [sum(b - a for a, b in chunks[s :: job.pp]) for s in range(job.pp)]
        ends = [sum(counts[:s]) for s in range(job.pp + 1)]
        return list(pairwise(ends))
    return chunks


def layout(chunks: list[tuple[int, int]]) -> str:
    """Returns the value of --pipeline-model-parallel-layout: E, t and L by stage."""
    parts = ["t" if last - first == 1 else f"t*{last - first}" for first, last in chunks]
    parts[0] = f"E{parts[0]}" if parts[0] == "t" else f"E,{parts[0]}"
    parts[-1] = f"{parts[-1]},L"
    return "|".join(parts)


def recompute_settings(recompute: str | None) -> dict[str, Setting]:
    """Returns the arguments for recompute of every layer, or of attention's scores."""
    if recompute == "full":
        return {
            "recompute-granularity": "full",
            "recompute-method": "uniform",
            "recompute-num-layers": 1,
        }
    if recompute == "selective":
        return {"recompute-granularity": "selective", "recompute-modules": "core_attn"}
    return {}


def _argument(name: str, value: Setting) -> str:
    return f"--{name}" if value is True else f"--{name} {shlex.quote(str(value))}"
