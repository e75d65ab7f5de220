"""Slack: how many micro-batches each stage of a 1F1B plan holds beyond its own, as memory allows.

Weight gradients that are put off fill the end of the step, where stages wait for those after them
(Zero Bubble, section 3.1). A forward more ahead keeps the stages after it busy while gradients are
on their way.
"""

from __future__ import annotations

from dataclasses import replace

from heteropp.cluster import Cluster
from heteropp.plan import Plan
from heteropp.planned import rank_memory
from heteropp.schedule import late_and_ahead


def with_slack(plan: Plan, cluster: Cluster, ahead: int = 0) -> Plan:
    """A 1F1B plan with the most slack that fits, up to that of ZB-H1: stage s puts off s.

    ahead: how many forwards more each stage is to run ahead, the last one not: none waits for it.
    """
    slack = [
        [s + ahead * (s + 1 < len(pipeline.stages)) for s in range(len(pipeline.stages))]
        for pipeline in plan.pipelines
    ]
    while True:
        found = _with(plan, slack)
        if not (over := _overrun(found, cluster)):
            return found
        for p, s in over:
            slack[p][s] //= 2
        for mosts in slack:
            _keep_fed(mosts)


def _keep_fed(slack: list[int]) -> None:
    """Of a pipeline: no stage runs more forwards ahead than the one before it."""
    for s in range(1, len(slack)):
        _, ahead = late_and_ahead(slack[s - 1], s - 1)
        slack[s] = min(slack[s], s + ahead)


def _with(plan: Plan, slack: list[list[int]]) -> Plan:
    pipelines = tuple(
        replace(
            pipeline,
            stages=tuple(
                replace(stage, slack=most)
                for stage, most in zip(pipeline.stages, mosts, strict=True)
            ),
        )
        for pipeline, mosts in zip(plan.pipelines, slack, strict=True)
    )
    return replace(plan, pipelines=pipelines)


def _overrun(plan: Plan, cluster: Cluster) -> list[tuple[int, int]]:
    """(pipeline, stage) of those that do not fit and have slack to give up."""
    memory = rank_memory(plan, cluster)
    return [
        (p, s)
        for p, pipeline in enumerate(plan.pipelines)
        for s, stage in enumerate(pipeline.stages)
        if stage.slack
        and any(
            memory[rank].total > cluster.chip(rank).memory.capacity_bytes
            for replica in stage.replicas
            for rank in replica.ranks
        )
    ]
