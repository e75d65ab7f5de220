"""Pipelines whose micro-batches run slice by slice: the stages of a few long sequences fill sooner.

Slices of one pipeline are those of all its stages, so that a plan is cut as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from heteropp.description.plan import Pipeline, Plan
from heteropp.models.spec import ModelError, ModelSpec
from heteropp.search.auto.freedom import Freedom
from heteropp.search.auto.trials import with_pipelines
from heteropp.search.parts import BY_WORK, WAYS, ways_to_cut

FINE = 4  # such units in a slice, in the mean, or more: else slices are cut anywhere


def whole(plan: Plan) -> Plan:
    """Returns a plan whose pipelines run sequences whole."""
    return with_pipelines(plan, [replace(p, token_slices=None) for p in plan.pipelines])


def sliced(plan: Plan, count: int, way: int) -> Plan | None:
    """Returns a plan whose pipelines of several stages run each sequence in so many slices.

    way: to cut it; see `ways_to_cut`. None where a sequence cannot be cut so.
    """
    try:
        pipelines = [_sliced(pipeline, plan.model, count, way) for pipeline in plan.pipelines]
    except ModelError:
        return None
    return with_pipelines(plan, pipelines)


def _sliced(pipeline: Pipeline, model: ModelSpec, count: int, way: int) -> Pipeline:
    if len(pipeline.stages) == 1:  # which no slice would reach sooner
        return replace(pipeline, token_slices=None)
    unit = tp = math.lcm(*(stage.tp for stage in pipeline.stages))
    if model.expert_count:  # of slices whose experts have whole numbers of rows few need a trace
        unit = math.lcm(tp, model.expert_count)
    if model.sequence_length % unit or model.sequence_length < FINE * count * unit:
        unit = tp
    ways = ways_to_cut(model, count, unit)
    return replace(pipeline, token_slices=ways[min(way, len(ways) - 1)])


def cut_anew(plan: Plan) -> Plan:
    """Returns a plan whose slices go with stages that are others than before: tensor-parallel
    degrees divide them, and pipelines of one stage have none.
    """
    found = [_cut_anew(pipeline, plan.model) for pipeline in plan.pipelines]
    return with_pipelines(plan, found) if plan.has_slices else plan


def _cut_anew(pipeline: Pipeline, model: ModelSpec) -> Pipeline:
    slices, tps = pipeline.token_slices or (), {stage.tp for stage in pipeline.stages}
    if len(pipeline.stages) > 1 and not any(tokens % tp for tokens in slices for tp in tps):
        return pipeline
    try:
        return _sliced(pipeline, model, pipeline.slices, BY_WORK)
    except ModelError:
        return replace(pipeline, token_slices=None)


def for_longer_in_slices(plan: Plan, model: ModelSpec, factor: int, way: int) -> Plan | None:
    """Returns a plan for sequences so many times as long, and as many fewer, from one for a model
    whose sequences are that much shorter: what was a micro-batch is a slice of one now.

    Returns None where a pipeline's micro-batches do not make whole ones.
    """
    if any(pipeline.micro_batches % factor for pipeline in plan.pipelines):
        return None
    pipelines = [replace(p, micro_batches=p.micro_batches // factor) for p in plan.pipelines]
    longer = replace(plan, model=model, global_batch=plan.global_batch // factor)
    return sliced(with_pipelines(longer, pipelines), factor, way)


def token_slices(plan: Plan, freedom: Freedom) -> Iterator[Plan]:
    """Every sequence in twice as many slices or half as many, or cut in another way."""
    most = max(freedom.token_slices)
    count = max(pipeline.slices for pipeline in plan.pipelines)
    for other in dict.fromkeys((count, 2 * count, 4 * count, max(1, count // 2), 1)):
        for way in range(WAYS if 1 < other <= most else 1):
            if other <= most and (found := sliced(plan, other, way)) not in (None, plan):
                yield found
