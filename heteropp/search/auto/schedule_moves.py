"""Other schedules for a plan, and other numbers of ministages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from heteropp.description.plan import Plan
from heteropp.description.schedules import Schedule
from heteropp.search.auto.busy import with_layers
from heteropp.search.auto.changed import offloaded, places, with_each
from heteropp.search.auto.freedom import Freedom, as_schedule
from heteropp.search.auto.trials import with_pipelines

MINISTAGES = (2, 3, 4)  # of schedules that interleave them


def schedules(plan: Plan, freedom: Freedom) -> Iterator[Plan]:
    """Yields the plan under each other schedule that the request leaves open, and there also with
    its stages offloaded, if they have several ministages. Interleaved stages are also given equally
    many layers, with each number of ministages that divides these.
    """
    made = itertools.chain.from_iterable(_under(schedule, plan) for schedule in freedom.schedules)
    yield from (other for other in dict.fromkeys(made) if other != plan)


def _under(schedule: Schedule, plan: Plan) -> Iterator[Plan]:
    interleaves = schedule == "interleaved-1f1b"
    for count in MINISTAGES if interleaves else (1,):
        if other := as_schedule(plan, schedule, count):
            yield other
            yield with_each(other, offloaded)
    if interleaves:
        yield from _in_equal_ministages(plan)


def _in_equal_ministages(plan: Plan) -> Iterator[Plan]:
    """Yields plans of interleaved stages whose ministages all hold equally many layers, so that
    they wait for one another as little as possible. The plan with the most ministages comes first.
    There are none if the layers cannot be divided equally among a pipeline's stages.
    """
    layers = plan.model.layers
    if any(layers % len(pipeline.stages) for pipeline in plan.pipelines):
        return
    held = [layers // len(pipeline.stages) for pipeline in plan.pipelines]
    pipelines = [
        replace(pipeline, stages=with_layers(pipeline.stages, [count] * len(pipeline.stages)))
        for pipeline, count in zip(plan.pipelines, held, strict=True)
    ]
    evened = with_pipelines(plan, pipelines)
    common = math.gcd(*held)
    for count in range(common, 1, -1):
        if common % count == 0:
            other = as_schedule(evened, "interleaved-1f1b", count)
            if other:
                yield other


def ministages(plan: Plan) -> Iterator[Plan]:
    """Yields the plan with another number of ministages in all stages: one more or less than now,
    or as many as the shortest stage has layers. Stages that then hold fewer layers than ministages
    take some from the longest stages.
    """
    if plan.schedule not in ("gpipe", "interleaved-1f1b"):
        return
    layers = min(stage.layer_count for _, _, stage in places(plan))
    held = max(stage.ministages for _, _, stage in places(plan))
    for count in dict.fromkeys((held + 1, held - 1, layers)):
        if 0 < count != held and (other := as_schedule(plan, plan.schedule, count)):
            yield other
