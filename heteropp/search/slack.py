"""Slack: how many weight gradients each stage of a 1F1B plan puts off, as far as memory holds them.

What is put off fills the end of the step, where stages wait for the gradients of those after them
(Zero Bubble, section 3.1). Each holds a micro-batch's activations a little longer.
"""

from __future__ import annotations

from dataclasses import replace

from heteropp.cluster import Cluster
from heteropp.plan import Plan
from heteropp.planned import rank_memory


def with_slack(plan: Plan, cluster: Cluster) -> Plan:
    """A 1F1B plan with the most slack that fits, up to that of ZB-H1: stage s puts off s."""
    slack = [list(range(len(pipeline.stages))) for pipeline in plan.pipelines]
    while True:
        found = _with(plan, slack)
        if not (over := _overrun(found, cluster)):
            return found
        for p, s in over:
            slack[p][s] //= 2


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
