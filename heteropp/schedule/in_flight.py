"""How many micro-batches a stage holds at once: one count for planners, memory and the executor."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from heteropp.description.plan import Pipeline, Schedule, ministage_layers
from heteropp.schedule.action import Kind
from heteropp.schedule.orders import Work, order
from heteropp.schedule.stage_actions import works_of


def in_flight(schedule: Schedule, pipeline: Pipeline, stage: int) -> float:
    """Returns the most micro-batches whose activations a stage holds at once.

    It is in units of the activations of all its layers, of one of its own micro-batches: each
    ministage counts as its share of them, and each slice as its share of the tokens. What a
    backward works on is held until its W has ended.
    """
    stages, micro_batches = len(pipeline.stages), pipeline.micro_batches
    own, parts = pipeline.stages[stage], pipeline.parts(stage)
    if tokens := pipeline.token_slices:
        return _most_held(works_of(schedule, pipeline, stage), (1,), tokens) / sum(tokens)
    if parts == 1 and schedule in ("1f1b", "gpipe") and own.ministages == 1:
        after = stages - 1 - stage + own.slack
        return float(whole_in_flight(schedule, micro_batches, stages, after))
    if schedule == "gpipe":
        return float(micro_batches * parts)
    sizes = tuple(last - first for first, last in ministage_layers(pipeline, schedule)[stage])
    if parts > 1 or schedule == "1f1b":
        return _most_held(works_of(schedule, pipeline, stage), sizes) / sum(sizes)
    return _most_held_in_order(schedule, stages, stage, micro_batches, sizes) / sum(sizes)


def whole_in_flight(schedule: str, micro_batches: int, stages: int, after: int) -> int:
    """Returns the most micro-batches in flight in a stage of one ministage and without slack.

    It is what the order of 1F1B, GPipe and ZB-H1 comes to, as a formula: planners ask for it
    millions of times, before there is a pipeline. after: the number of stages that follow.
    """
    if schedule == "1f1b":
        return min(after + 1, micro_batches)
    if schedule == "zb-h1":
        return min(stages, micro_batches)
    return micro_batches


@lru_cache(maxsize=65536)
def _most_held_in_order(
    schedule: str, stages: int, stage: int, micro_batches: int, sizes: tuple[int, ...]
) -> int:
    return _most_held(order(schedule, stages, stage, micro_batches, len(sizes)), sizes)


def _most_held(
    works: Iterable[Work], sizes: tuple[int, ...], tokens: tuple[int, ...] = (1,)
) -> int:
    """Returns the most layers' activations held at once, the one at work included.

    tokens: of each of a micro-batch's slices, as whose share it counts.
    """
    held = most = 0
    for kind, i, ministage in works:
        size = sizes[ministage] * tokens[i % len(tokens)]
        if kind == Kind.F:
            held += size
        most = max(most, held)
        if kind in (Kind.B, Kind.W):
            held -= size
    return most
