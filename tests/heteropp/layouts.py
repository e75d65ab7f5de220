"""Plans that lay one tiny model out in every way that the runtime knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from training_run import make_plan, moved, several_pipelines, tiny_model

from heteropp.description.plan import Plan, Schedule, Stage
from heteropp.models.llama.model import LlamaModel

SCHEDULES: tuple[Schedule, ...] = (
    "1f1b",
    "gpipe",
    "interleaved-1f1b",
    "zb-h1",
    "zb-v",
    "chimera",
)
MINISTAGES = {"interleaved-1f1b": 2, "zb-v": 2, "chimera": 2}


def plan_of(
    model: LlamaModel,
    layers: Sequence[int],
    dp: Sequence[int],
    tp: Sequence[int],
    *,
    shares: dict[int, Sequence[int]] | None = None,
    zero_stage: int = 1,
    **stage: Any,
) -> Plan:
    """Every second stage recomputes; `shares` by stage, where they are not equal."""
    recompute = [bool(s % 2) for s in range(len(layers))]
    plan = make_plan(model, layers, dp, tp, recompute, zero_stage=zero_stage)
    (pipeline,) = plan.pipelines
    stages = list(pipeline.stages)
    for s, given in (shares or {}).items():
        pairs = zip(stages[s].replicas, given, strict=True)
        replicas = tuple(replace(replica, batch_share=share) for replica, share in pairs)
        stages[s] = replace(stages[s], replicas=replicas)
    stages = [replace(s, **{k: v for k, v in stage.items() if _fits(s, k)}) for s in stages]
    return replace(plan, pipelines=(replace(pipeline, stages=tuple(stages)),))


def _fits(stage: Stage, option: str) -> bool:
    if option == "sequence_parallel":
        return stage.tp > 1
    return option != "selective_recompute" or not stage.recompute


def figure_8(model: LlamaModel) -> Plan:
    """The paper's example, dp 4, 2, 2 and tp 2, 4, 2, with fewer layers."""
    return plan_of(replace(model, kv_heads=4), (3, 3, 2), (4, 2, 2), (2, 4, 2))


def mixed_chips(model: LlamaModel) -> Plan:
    """Zorse's: replicas of two chip types in a stage, with unequal shares."""
    plan = plan_of(model, (4, 4), (2, 2), (1, 1), shares={0: (1, 3), 1: (3, 1)})
    (pipeline,) = plan.pipelines
    stages = tuple(
        replace(
            stage, replicas=(stage.replicas[0], replace(stage.replicas[1], chip="another.toml"))
        )
        for stage in pipeline.stages
    )
    return replace(plan, pipelines=(replace(pipeline, stages=stages),))


def two_pipelines(model: LlamaModel) -> Plan:
    """AutoHet's: unlike boundaries, tensor-parallel degrees and micro-batch counts."""
    one = plan_of(model, (5, 3), (1, 1), (1, 2)).pipelines[0]
    other = plan_of(model, (2, 6), (1, 1), (2, 1)).pipelines[0]
    pipelines = replace(one, micro_batches=2), replace(moved(other, 3), micro_batches=3)
    return replace(plan_of(model, (8,), (1,), (1,)), global_batch=20, pipelines=pipelines)


def turned(plan: Plan) -> Plan:
    """Every stage's replicas in the opposite order."""
    pipelines = tuple(
        replace(p, stages=tuple(replace(s, replicas=s.replicas[::-1]) for s in p.stages))
        for p in plan.pipelines
    )
    return replace(plan, pipelines=pipelines)


def three_pipelines(model: LlamaModel) -> Plan:
    """A tied head beside, so that six places sum an embedding; ZeRO over all of them."""
    plan = several_pipelines(
        replace(model, tied_embeddings=True),
        ((2, 6), (2, 1), (1, 2), 2),
        ((6, 2), (1, 1), (2, 1), 3),
        ((4, 4), (1, 1), (1, 1), 2),
    )
    return replace(turned(plan), zero_stage=2)


# of one rank a stage: bit for bit what the plain loop computes
EXACT: dict[str, Callable[[LlamaModel], Plan]] = {
    "two stages": lambda m: plan_of(m, (5, 3), (1, 1), (1, 1)),
    "four stages": lambda m: plan_of(m, (2, 2, 2, 2), (1,) * 4, (1,) * 4),
}
LAYOUTS: dict[str, Callable[[LlamaModel], Plan]] = EXACT | {
    "figure 8": figure_8,
    "dp 3 to 1, uneven": lambda m: plan_of(m, (4, 4), (3, 1), (1, 1), shares={0: (1, 2, 1)}),
    "tp 1 to 4": lambda m: plan_of(replace(m, kv_heads=4), (4, 4), (1, 1), (1, 4)),
    "tp 4 to 1": lambda m: plan_of(replace(m, kv_heads=4), (4, 4), (1, 1), (4, 1)),
    "micro-batch 2, 4, 2": lambda m: plan_of(
        m, (2, 4, 2), (2, 1, 2), (1, 2, 1), shares={0: (1, 1), 2: (1, 1)}
    ),
    "micro-batch 4, 1": lambda m: plan_of(m, (4, 4), (1, 1), (1, 2), shares={1: (1,)}),
    "two pipelines": two_pipelines,
    "three pipelines": three_pipelines,
    "mixed chips": mixed_chips,
    "broadcast": lambda m: replace(
        plan_of(m, (2, 4, 2), (2, 1, 1), (1, 2, 2)), resharding="broadcast"
    ),
    "direct": lambda m: replace(
        plan_of(m, (2, 4, 2), (2, 1, 1), (1, 2, 2)), resharding="direct", overlap=False
    ),
    "without overlap": lambda m: replace(plan_of(m, (4, 4), (2, 1), (1, 2)), overlap=False),
    "offload": lambda m: plan_of(m, (4, 4), (2, 1), (1, 1), offload=True),
    "tied embeddings": lambda m: plan_of(replace(m, tied_embeddings=True), (4, 4), (2, 1), (1, 2)),
    "sequence parallel, dropout": lambda m: plan_of(
        replace(m, dropout=0.2), (4, 4), (1, 1), (2, 2), sequence_parallel=True
    ),
    "selective recompute": lambda m: plan_of(m, (4, 4), (2, 1), (1, 2), selective_recompute=True),
    "slack": lambda m: plan_of(m, (2, 3, 3), (2, 1, 1), (1, 2, 1), slack=2),
    "ZeRO-2": lambda m: plan_of(m, (4, 4), (2, 2), (1, 1), zero_stage=2),
    "ZeRO-0": lambda m: plan_of(m, (4, 4), (2, 1), (1, 2), zero_stage=0),
}


def lay_out(name: str, schedule: Schedule, dtype: str) -> Plan | None:
    """A layout under a schedule; None where they do not go together."""
    plan = LAYOUTS[name](tiny_model(layers=8, dtype=dtype))
    if schedule == "chimera" and any(len(p.stages) % 2 for p in plan.pipelines):
        return None
    if schedule != "1f1b" and any(s.slack for p in plan.pipelines for s in p.stages):
        return None
    return scheduled(plan, schedule, MINISTAGES.get(schedule, 1))


def turn(layout: str, schedule: Schedule) -> int:
    """0 to 5: a sixth of all pairs each, in which every layout and every schedule has its turns."""
    return (list(LAYOUTS).index(layout) + SCHEDULES.index(schedule)) % len(SCHEDULES)


def scheduled(plan: Plan, schedule: Schedule, *ministages: int) -> Plan:
    """`ministages` of the stages, over and over."""
    pipelines = tuple(
        replace(
            pipeline,
            stages=tuple(
                replace(stage, ministages=ministages[s % len(ministages)])
                for s, stage in enumerate(pipeline.stages)
            ),
        )
        for pipeline in plan.pipelines
    )
    return replace(plan, schedule=schedule, pipelines=pipelines)
