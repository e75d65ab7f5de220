"""What a plan takes at least, known before it is simulated: the work of its busiest replica, which
begins when the first forward has come through the stages before it. And the layers that each stage
should hold for that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from heteropp.cost.planned import StageWork, group_links, ministage_times, spread_of, stage_works
from heteropp.cost.stage_time import over_slices
from heteropp.description.cluster import Cluster
from heteropp.description.plan import Pipeline, Plan, Stage
from hyperhetero.remembered import Remembered

DEALS = 3  # of layers: the seconds of one are those that the last deal showed


@dataclass(frozen=True)
class ReplicaWork:
    """Seconds of a replica in a step."""

    own_s: float  # forwards and backwards, and the norm
    update_s: float
    first_s: float  # until its first forward's first ministage is done


def busy_s(plan: Plan, cluster: Cluster) -> float:
    """Returns seconds that a step of a plan takes at least."""
    most_s = 0.0
    for pipeline in plan.pipelines:
        come_s = 0.0  # of the first forward, through the stages before
        for replicas in _works(plan, pipeline, cluster):
            most_s = max(most_s, *(w.own_s + max(w.update_s, come_s) for w in replicas))
            if plan.schedule != "chimera":  # whose pipelines begin at both ends
                come_s += min(w.first_s for w in replicas)
    return most_s


def balanced(plan: Plan, cluster: Cluster) -> Plan:
    """Returns a plan whose stages hold layers so that the busiest one has as little work as can be,
    whatever memory has room for.
    """
    if plan.schedule == "chimera":  # whose stages hold their mirrored stages' layers, too
        return plan
    pipelines = tuple(_balanced(plan, pipeline, cluster) for pipeline in plan.pipelines)
    return replace(plan, pipelines=pipelines)


def _balanced(plan: Plan, pipeline: Pipeline, cluster: Cluster) -> Pipeline:
    for _ in range(DEALS):
        seconds = [
            max(work.own_s + work.update_s for work in replicas)
            for replicas in _works(plan, pipeline, cluster)
        ]
        counts = _evened(pipeline.stages, seconds)
        dealt = with_layers(pipeline.stages, counts)
        if dealt == pipeline.stages:
            break
        pipeline = replace(pipeline, stages=dealt)
    return pipeline


def _evened(stages: Sequence[Stage], seconds: list[float]) -> list[int]:
    """Returns how many layers stages should hold that now take so many seconds."""
    counts = [stage.layer_count for stage in stages]
    layer_s = [whole_s / count for whole_s, count in zip(seconds, counts, strict=True)]
    while True:
        after_s = [now_s + more_s for now_s, more_s in zip(seconds, layer_s, strict=True)]
        giver, taker = seconds.index(max(seconds)), after_s.index(min(after_s))
        if counts[giver] <= stages[giver].ministages or after_s[taker] >= seconds[giver]:
            return counts
        counts[giver], counts[taker] = counts[giver] - 1, counts[taker] + 1
        seconds[giver], seconds[taker] = seconds[giver] - layer_s[giver], after_s[taker]


def with_layers(stages: Sequence[Stage], counts: Sequence[int]) -> tuple[Stage, ...]:
    """Returns the stages with so many layers each, in order."""
    bounds = itertools.accumulate(counts, initial=0)
    return tuple(
        replace(stage, layers=span)
        for stage, span in zip(stages, itertools.pairwise(bounds), strict=True)
    )


def _works(plan: Plan, pipeline: Pipeline, cluster: Cluster) -> Iterator[tuple[ReplicaWork, ...]]:
    """Yields the work of each stage's replicas, once of those that are alike."""
    for s, work in enumerate(stage_works(plan, pipeline)):
        count = pipeline.micro_batches * pipeline.parts(s)
        if plan.schedule == "chimera":  # a ministage has every other micro-batch
            count = count // 2
        make = partial(_stage_works, plan, work, count, cluster)
        yield _known.get((work, count, cluster), make)


# most neighbours of a plan differ from it in one stage or two
_known: Remembered[tuple[ReplicaWork, ...]] = Remembered(1024)


def _stage_works(
    plan: Plan, work: StageWork, count: int, cluster: Cluster
) -> tuple[ReplicaWork, ...]:
    """Returns the work of a stage's replicas; count: micro-batches through each ministage."""
    alike = {}
    for replica in work.stage.replicas:
        for cp_index in range(work.stage.cp):
            rank = replica.group(cp_index)[0]
            alike[replica.kind, cp_index, spread_of(plan, rank)] = rank
    return tuple(_work(plan, work, count, rank, cluster) for rank in alike.values())


def _work(plan: Plan, work: StageWork, count: int, rank: int, cluster: Cluster) -> ReplicaWork:
    """Returns the work of a rank."""
    links = group_links(plan, cluster, rank)
    by_slice = ministage_times(plan, cluster, rank, work.held, links)
    times, first = [over_slices(slices) for slices in by_slice], by_slice[0][0]
    return ReplicaWork(
        own_s=sum(count * time.micro_batch_s + time.norm_s for time in times),
        update_s=sum(time.update_s for time in times),
        first_s=max(first.forward_s, first.store_s),
    )
