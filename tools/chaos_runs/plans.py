"""The plans that a scene's job begins with, and that of the undisturbed run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import TypeVar

from chaos_runs.scene import MICRO_BATCH, MICRO_BATCHES, Curve, Scene

from heteropp.description.cluster import Cluster
from heteropp.description.plan import (
    Pipeline,
    Plan,
    PlanError,
    Replica,
    Schedule,
    Stage,
    ZeroStage,
    validate,
)
from heteropp.models.spec import ModelSpec

T = TypeVar("T")
Ranks = tuple[int, ...]  # of a replica
EVERY_PARTS = 3  # every how many seeds cut sequences over ranks, and every how many into slices
SLICE = 8  # tokens, of which each is some


def one_rank(curve: Curve) -> Plan:
    """A plan in which one rank trains alone."""
    stage = Stage(
        layers=(0, curve.model.layers),
        recompute=False,
        replicas=(Replica(ranks=(0,), chip="a.toml", batch_share=MICRO_BATCH),),
    )
    return _plan(curve, (Pipeline(micro_batches=MICRO_BATCHES, stages=(stage,)),))


def first_plan(scene: Scene, cluster: Cluster) -> Plan:
    """Some plan on all chips of a cluster."""
    random = Random(f"plan {scene.seed}")
    model = scene.curve.model
    tp = random.choice([1, 1, 2])
    units = [
        tuple(node.ranks[first : first + tp])
        for node in cluster.nodes
        for first in range(0, len(node.ranks), tp)
    ]
    count = random.choice([1, 2]) if len(units) > 1 else 1
    taken = _cut(random, range(MICRO_BATCHES), count)
    pipelines = []
    for p, group in enumerate(_cut(random, units, count)):
        stages = _stages(random, group, model.layers, cluster)
        pipelines.append(Pipeline(micro_batches=len(taken[p]), stages=stages))
    if scene.seed % EVERY_PARTS == 0:
        pipelines = [
            replace(pipeline, stages=tuple(_in_parts(random, s, model) for s in pipeline.stages))
            for pipeline in pipelines
        ]
    if model.expert_count:
        pipelines = [
            replace(pipeline, stages=tuple(_spread(random, s, model) for s in pipeline.stages))
            for pipeline in pipelines
        ]
    plan = _plan(scene.curve, tuple(pipelines), scene.schedule, scene.zero_stage)
    validate(plan)
    if scene.seed % EVERY_PARTS == 1:
        with suppress(PlanError):  # not every plan can run slices
            other = _in_slices(random, plan)
            validate(other)
            return other
    return plan


def _in_slices(random: Random, plan: Plan) -> Plan:
    """Returns a plan whose pipelines run each sequence in two to four slices."""
    units = range(plan.model.sequence_length // SLICE)
    slices = tuple(SLICE * len(part) for part in _cut(random, units, random.choice([2, 3, 4])))
    pipelines = (replace(pipeline, token_slices=slices) for pipeline in plan.pipelines)
    return replace(plan, pipelines=tuple(pipelines))


def _plan(
    curve: Curve,
    pipelines: tuple[Pipeline, ...],
    schedule: Schedule = "1f1b",
    zero_stage: ZeroStage = 0,
) -> Plan:
    return Plan(
        model=curve.model,
        global_batch=MICRO_BATCH * MICRO_BATCHES,
        micro_batch=MICRO_BATCH,
        schedule=schedule,
        zero_stage=zero_stage,
        pipelines=pipelines,
    )


def _stages(
    random: Random, units: Sequence[Ranks], layers: int, cluster: Cluster
) -> tuple[Stage, ...]:
    fewest = -(-len(units) // MICRO_BATCH)  # a replica has a sequence at least
    groups: list[list[Ranks]] = [[()] * layers * 2]
    while max(map(len, groups)) > MICRO_BATCH:
        count = random.randint(fewest, min(len(units), layers))
        groups = [_alike(group) for group in _cut(random, units, count)]
    spans = _cut(random, range(layers), len(groups))
    return tuple(
        Stage(
            layers=(span[0], span[-1] + 1),
            recompute=False,
            replicas=tuple(
                Replica(
                    ranks=ranks,
                    chip=cluster.node(ranks[0]).chip_name,
                    batch_share=MICRO_BATCH // len(group) + (i < MICRO_BATCH % len(group)),
                )
                for i, ranks in enumerate(group)
            ),
        )
        for span, group in zip(spans, groups, strict=True)
    )


def _in_parts(random: Random, stage: Stage, model: ModelSpec) -> Stage:
    """Replicas become parts of fewer ones, with unequal numbers of tokens."""
    cp = random.choice([n for n in range(2, stage.dp + 1) if stage.dp % n == 0] or [1])
    if cp == 1:
        return stage
    replicas = []
    for first in range(0, stage.dp, cp):
        parts = stage.replicas[first : first + cp]
        tokens = _cut(random, range(model.sequence_length // stage.tp), cp)
        replicas.append(
            Replica(
                ranks=tuple(rank for part in parts for rank in part.ranks),
                chip=parts[0].chip,
                batch_share=sum(part.batch_share for part in parts),
                token_shares=tuple(len(own) * stage.tp for own in tokens),
                group_chips=tuple(part.chip for part in parts),
            )
        )
    return replace(stage, replicas=tuple(replicas))


def _spread(random: Random, stage: Stage, model: ModelSpec) -> Stage:
    """Experts lie over the groups of a stage that has several, in unequal numbers."""
    most = min(stage.copies, model.expert_count)
    ep = random.choice([n for n in range(2, most + 1) if stage.copies % n == 0] or [1])
    if ep == 1:
        return stage
    shares = tuple(map(len, _cut(random, range(model.expert_count), ep)))
    return replace(stage, expert_shares=shares)


def _alike(units: Sequence[Ranks]) -> list[Ranks]:
    """All of the smallest one's size, which divides the others'."""
    size = min(map(len, units))
    return [unit[i : i + size] for unit in units for i in range(0, len(unit), size)]


def _cut(random: Random, things: Sequence[T], count: int) -> list[Sequence[T]]:
    """Cuts the sequence at random into `count` parts, none of them empty."""
    ends = sorted(random.sample(range(1, len(things)), count - 1))
    return [things[a:b] for a, b in zip([0, *ends], [*ends, len(things)], strict=True)]
