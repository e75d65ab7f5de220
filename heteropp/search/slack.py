"""Slack: how many micro-batches each stage of a 1F1B plan holds beyond its own, as memory allows.

Weight gradients that are put off fill the end of the step, where stages wait for those after them
(Zero Bubble, section 3.1). A forward more ahead keeps the stages after it busy while gradients are
on their way.
"""

from __future__ import annotations

from dataclasses import replace

from heteropp.cost.planned import rank_memory
from heteropp.description.cluster import Cluster
from heteropp.description.plan import Plan
from heteropp.schedule.stage_actions import late_and_ahead


def with_slack(plan: Plan, cluster: Cluster, ahead: int = 0) -> Plan:
    """Returns a 1F1B plan with slack that fits: that of ZB-H1, where stage s puts off s.

    A stage that lacks memory has half as much, and so on until it fits.

    ahead: how many more forwards each stage runs ahead, but for the last, which no stage waits for.
    """
    slack = _most(plan, ahead)
    while True:
        found = _with(plan, slack)
        givers = {(p, _giver(slack[p], s)) for p, s in _overrun(found, cluster)}
        if all(s is None for _, s in givers):
            return found
        for p, s in givers:
            if s is not None:
                slack[p][s] //= 2
        for mosts in slack:
            _keep_fed(mosts)


def with_most_slack(plan: Plan, ahead: int = 0) -> Plan:
    """Returns what `with_slack` does where memory has room for all of it."""
    return _with(plan, _most(plan, ahead))


def _most(plan: Plan, ahead: int) -> list[list[int]]:
    return [
        [s + ahead * (s + 1 < len(pipeline.stages)) for s in range(len(pipeline.stages))]
        for pipeline in plan.pipelines
    ]


def _giver(slack: list[int], s: int) -> int | None:
    """Returns the stage that gives up slack where stage s does not fit; None where none has any.

    It is s itself or, if s has no slack, the nearest stage before it that runs ahead and fills it.
    """
    if slack[s]:
        return s
    return next((t for t in reversed(range(s)) if late_and_ahead(slack[t], t)[1]), None)


def _keep_fed(slack: list[int]) -> None:
    """Lowers a pipeline's slack until no stage runs more forwards ahead than the one before it."""
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
    """Returns (pipeline, stage) of every stage that overruns some chip's memory."""
    memory = rank_memory(plan, cluster)
    return [
        (p, s)
        for p, pipeline in enumerate(plan.pipelines)
        for s, stage in enumerate(pipeline.stages)
        if any(
            memory[rank].total > cluster.capacity_bytes[rank]
            for replica in stage.replicas
            for rank in replica.ranks
        )
    ]
