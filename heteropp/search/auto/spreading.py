"""How the experts of a stage may lie over its tensor-parallel groups."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import Literal, get_args

from heteropp.cost.communication import NO_LINK
from heteropp.cost.expert_shares import expert_shares
from heteropp.cost.planned import slowest_link
from heteropp.cost.stage_time import StageShape, stage_time
from heteropp.description.chips import ChipSpec
from heteropp.description.cluster import Cluster, Link
from heteropp.description.plan import Plan, Stage
from heteropp.models.spec import ModelSpec
from heteropp.search.auto.changed import with_each
from heteropp.search.auto.freedom import Freedom

By = Literal["speed", "equal", "memory"]  # what the chips of groups have experts by
WAYS: tuple[By, ...] = get_args(By)
DEGREES = 3  # of a stage, at most, the largest ones


def degrees(stage: Stage, most: int) -> list[int]:
    """Returns the expert-parallel degrees to try, the largest first; none of a single group.

    most: ranks over which experts may lie.
    """
    copies = stage.copies
    found = [copies // n for n in range(1, copies) if copies % n == 0 and copies // n <= most]
    return found[:DEGREES]


def spread(stage: Stage, freedom: Freedom, degree: int, by: By) -> Stage:
    """Returns a stage whose experts lie over so many groups, each of which has them by its chip.

    Of groups that are to hold the same experts, the slowest or smallest chip counts.
    """
    model, cluster = freedom.request.model, freedom.request.cluster
    chips = [cluster.chip(group[0]) for group in stage.groups]
    if by == "equal":
        values = [1.0] * len(chips)
    elif by == "memory":
        values = [float(chip.memory.capacity_bytes) for chip in chips]
    else:
        sequences = -(-stage.micro_batch // stage.copies)
        links = [slowest_link(cluster, group[0], group) for group in stage.groups]
        values = [
            _speed(model, chip, link, stage.tp, sequences)
            for chip, link in zip(chips, links, strict=True)
        ]
    least = [min(values[i::degree]) for i in range(degree)]
    return replace(
        stage,
        expert_shares=expert_shares(model, least),
        expert_capacity=freedom.request.expert_capacity,
        offload=False,
    )


@lru_cache(maxsize=1024)
def _speed(model: ModelSpec, chip: ChipSpec, inside: Link, tp: int, sequences: int) -> float:
    """Returns the layers a second of a group that has all experts."""
    shape = StageShape(
        layers=1,
        first=False,
        last=False,
        tp=tp,
        dp=1,
        sequences=sequences,
        zero_stage=0,
        optimizer="adamw",
        recompute=False,
    )
    return 1 / stage_time(model, shape, chip, inside, NO_LINK).micro_batch_s


def with_shares_that_fit(plan: Plan, freedom: Freedom) -> Plan:
    """Returns a plan some of whose stages have other groups than before, with experts spread over
    as many of these as before at most.
    """
    if not plan.has_expert_parallelism:
        return plan
    return with_each(plan, partial(_that_fits, freedom))


def _that_fits(freedom: Freedom, stage: Stage) -> Stage:
    if stage.ep == 1 or stage.copies % stage.ep == 0:
        return stage
    degree = next(iter(degrees(stage, stage.ep)), 1)
    return spread(stage, freedom, degree, "speed") if degree > 1 else gathered(stage)


def gathered(stage: Stage) -> Stage:
    """Returns a stage every group of which has all experts."""
    return replace(stage, expert_shares=None, expert_capacity=None)


def roomier(cluster: Cluster, factor: int) -> Cluster:
    """Returns a cluster whose chips have so many times the memory."""

    def more(chip: ChipSpec) -> ChipSpec:
        memory = chip.memory
        return replace(chip, memory=replace(memory, capacity_bytes=factor * memory.capacity_bytes))

    return replace(
        cluster, nodes=tuple(replace(node, chip=more(node.chip)) for node in cluster.nodes)
    )
