"""A plan's pipelines as one, whose stages have several replicas: the frameworks have no other."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from heteropp.description.plan import Plan, Stage
from heteropp.frameworks.file import ExportError, Replacement


@dataclass(frozen=True)
class SinglePipeline:
    """The stages of a plan's only pipeline, or of the one that replaces several."""

    stages: tuple[Stage, ...]
    replacements: tuple[Replacement, ...]


def single_pipeline(plan: Plan) -> SinglePipeline:
    """Returns a plan's stages in one pipeline, and what none of the frameworks has of them.

    Raises ExportError.
    """
    if plan.has_context_parallelism:
        raise ExportError(
            "the plan has token_shares, tokens of a sequence cut over ranks in parts of their own; "
            "no framework that plans are written for has such"
        )
    if plan.has_slices:
        raise ExportError(
            "the plan has token_slices, in which stages run a micro-batch one after another; no "
            "framework that plans are written for has such"
        )
    if plan.has_expert_parallelism:
        raise ExportError(
            "the plan has expert_shares, experts that lie over ranks in numbers of their own; no "
            "framework that plans are written for has such"
        )
    found: list[Replacement] = []
    stages = plan.pipelines[0].stages
    if len(plan.pipelines) > 1:
        stages = _joined(plan, found)
    shares = {r.batch_share for stage in stages for r in stage.replicas if stage.dp > 1}
    if any(len({r.batch_share for r in stage.replicas}) > 1 for stage in stages):
        text = " and ".join(map(str, sorted(shares)))
        found.append(Replacement(f"replicas with {text} sequences", "equal shares"))
    if len({s.micro_batch for p in plan.pipelines for s in p.stages}) > 1:
        found.append(
            Replacement("stages that take a micro-batch in parts", "one micro-batch for all stages")
        )
    if any(len(set(stage.chips)) > 1 for stage in stages):
        found.append(
            Replacement(
                "stages of chips of several types", "the stage waits for the slower replica"
            )
        )
    given = _given(plan)
    slacks = [str(stage.slack) for stage in given]
    if set(slacks) != {"0"}:
        found.append(
            Replacement(f"slack {', '.join(slacks)} micro-batches by stage", "none: sends wait")
        )
    if any(stage.offload for stage in given):
        found.append(
            Replacement("offload of idle ministages to host memory", "everything on the chip")
        )
    return SinglePipeline(stages, tuple(found))


def _given(plan: Plan) -> list[Stage]:
    return [stage for pipeline in plan.pipelines for stage in pipeline.stages]


def _joined(plan: Plan, found: list[Replacement]) -> tuple[Stage, ...]:
    """Joins pipelines that are cut alike, stage by stage, or else cuts the layers evenly."""
    several = f"{len(plan.pipelines)} pipelines"
    counts = [pipeline.micro_batches for pipeline in plan.pipelines]
    if len(set(counts)) > 1:
        text = ", ".join(map(str, counts))
        found.append(Replacement(f"pipelines of {text} micro-batches", "as many for each replica"))
    rows_are_cut = sequence_parallel(_given(plan), found)
    cuts = {tuple((s.layers, s.ministages, s.tp) for s in p.stages) for p in plan.pipelines}
    if len(cuts) == 1:
        found.append(Replacement(several, "one pipeline with their replicas"))
        by_stage = list(zip(*(pipeline.stages for pipeline in plan.pipelines), strict=True))
        if any(_recompute_differs(alike) for alike in by_stage):
            found.append(
                Replacement(
                    "recompute in some pipelines",
                    "in all of them, which costs time and saves memory",
                )
            )
        return tuple(
            replace(
                alike[0],
                replicas=tuple(r for stage in alike for r in stage.replicas),
                recompute=(recompute := any(stage.recompute for stage in alike)),
                selective_recompute=not recompute and any(s.selective_recompute for s in alike),
                sequence_parallel=rows_are_cut and alike[0].tp > 1,
            )
            for alike in by_stage
        )
    if _recompute_differs(_given(plan)):
        found.append(
            Replacement(
                "recompute on some stages", "on every stage, which costs time and saves memory"
            )
        )
    stages = _even(plan, rows_are_cut)
    found.append(
        Replacement(
            f"{several} that are cut differently",
            f"one of {len(stages)} stages with {stages[0].dp} replicas of tp {stages[0].tp}",
        )
    )
    return stages


def _recompute_differs(stages: Iterable[Stage]) -> bool:
    return len({(stage.recompute, stage.selective_recompute) for stage in stages}) > 1


def _even(plan: Plan, rows_are_cut: bool) -> tuple[Stage, ...]:
    """Returns equal stages: as many as the longest pipeline has, or fewer that divide.

    rows_are_cut: by sequence parallelism, where they can be.
    """
    given = _given(plan)
    tp = math.gcd(*(stage.tp for stage in given))
    replicas = [
        replace(replica, ranks=replica.ranks[i : i + tp])
        for stage in given
        for replica in stage.replicas
        for i in range(0, stage.tp, tp)
    ]
    most = max(len(pipeline.stages) for pipeline in plan.pipelines)
    count = max(n for n in range(1, most + 1) if not len(replicas) % n)
    dp = len(replicas) // count
    recompute = any(stage.recompute for stage in given)
    first = replace(
        given[0],
        ministages=1,
        slack=0,
        recompute=recompute,
        selective_recompute=not recompute and any(s.selective_recompute for s in given),
        sequence_parallel=rows_are_cut and tp > 1,
    )
    share = max(replica.batch_share for replica in replicas)
    return tuple(
        replace(
            first,
            layers=layers,
            replicas=tuple(replace(r, batch_share=share) for r in replicas[s * dp : (s + 1) * dp]),
        )
        for s, layers in enumerate(divided((0, plan.model.layers), count))
    )


def divided(layers: tuple[int, int], parts: int) -> list[tuple[int, int]]:
    """Cuts layers [first, last) as evenly as can be, longer parts first."""
    first, last = layers
    size, rest = divmod(last - first, parts)
    ends = [first]
    for part in range(parts):
        ends.append(ends[-1] + size + (part < rest))
    return list(pairwise(ends))


def sequence_parallel(stages: Iterable[Stage], found: list[Replacement]) -> bool:
    """Whether rows are cut; the frameworks have one answer for all stages with tp above 1."""
    chosen = {stage.sequence_parallel for stage in stages if stage.tp > 1}
    if len(chosen) > 1:
        found.append(
            Replacement(
                "sequence parallelism on some stages",
                "on every stage with tp above 1, which saves memory",
            )
        )
    return True in chosen
