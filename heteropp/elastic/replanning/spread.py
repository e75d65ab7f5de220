"""Plans whose experts lie over the chips of each stage."""

from __future__ import annotations

from dataclasses import replace

from heteropp.cost.expert_shares import expert_shares
from heteropp.description.plan import Plan, Stage
from heteropp.models.spec import ModelError
from heteropp.search.skeletons import Power


def spread(plan: Plan, power: Power, capacity: float | None) -> Plan | None:
    """Returns a plan with the experts of each stage over as many of its groups as can be, more of
    them on faster ones; None where no stage has several, or the model has no such experts.

    power: of a tensor-parallel group. capacity: see Stage.expert_capacity.
    """
    try:
        pipelines = tuple(
            replace(
                pipeline,
                stages=tuple(_spread(plan, stage, power, capacity) for stage in pipeline.stages),
            )
            for pipeline in plan.pipelines
        )
    except ModelError:
        return None
    found = replace(plan, pipelines=pipelines)
    return found if found.has_expert_parallelism else None


def _spread(plan: Plan, stage: Stage, power: Power, capacity: float | None) -> Stage:
    most = min(stage.copies, plan.model.expert_count)
    ep = next((n for n in range(most, 1, -1) if stage.copies % n == 0), 1)
    if ep == 1:
        return stage
    # each of the groups that hold the same experts has a turn's rows, and the slowest counts
    speeds = [min(map(power, stage.groups[i::ep])) for i in range(ep)]
    shares = expert_shares(plan.model, speeds)
    return replace(stage, expert_shares=shares, expert_capacity=capacity)


def stated_capacity(plan: Plan) -> float | None:
    """Returns the largest expert_capacity that a stage of a plan states; None: none does."""
    stages = (stage for pipeline in plan.pipelines for stage in pipeline.stages)
    return max(filter(None, (stage.expert_capacity for stage in stages)), default=None)
