"""Plans some of whose stages are others."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace

from heteropp.description.plan import Plan, Replica, Stage
from heteropp.search.auto.trials import with_pipelines


def places(plan: Plan) -> Iterator[tuple[int, int, Stage]]:
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            yield p, s, stage


def with_stages(plan: Plan, p: int, stages: Sequence[Stage]) -> Plan:
    pipelines = list(plan.pipelines)
    pipelines[p] = replace(pipelines[p], stages=tuple(stages))
    return with_pipelines(plan, pipelines)


def with_one(plan: Plan, p: int, s: int, stage: Stage) -> Plan:
    stages = list(plan.pipelines[p].stages)
    stages[s] = stage
    return with_stages(plan, p, stages)


def with_each(plan: Plan, change: Callable[[Stage], Stage]) -> Plan:
    return with_pipelines(
        plan,
        [
            replace(pipeline, stages=tuple(map(change, pipeline.stages)))
            for pipeline in plan.pipelines
        ],
    )


def offloaded(stage: Stage) -> Stage:
    """Returns a stage whose activations wait in host memory and are not computed again, if it has
    ministages of which some are idle.
    """
    if stage.ministages == 1 or stage.cp > 1:
        return stage
    return replace(stage, offload=True, recompute=False, selective_recompute=False)


def exchange_kind(replica: Replica) -> Hashable:
    """Returns a key that is equal for replicas that may exchange their ranks."""
    return replica.chips, len(replica.ranks)


def with_ranks(stage: Stage, ranks: dict[int, tuple[int, ...]]) -> Stage:
    """Returns the stage with other ranks for some replicas, by their numbers."""
    replicas = list(stage.replicas)
    for r, own in ranks.items():
        replicas[r] = replace(replicas[r], ranks=own)
    return replace(stage, replicas=tuple(replicas))
