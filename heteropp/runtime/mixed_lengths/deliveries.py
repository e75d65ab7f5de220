"""Where each part of another plan's gradients is added to home's.

Until a plan's ranks have summed their gradients, each has a summand, of its share of the batch.
Home sums over its own ranks in any case: so a summand of another plan may go to any place of home
that has the parameter, if it goes to one.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from heteropp.description.plan import Plan, Stage, ministage_layers
from heteropp.layout.boxes import Box, Ranges
from heteropp.layout.parameter import Parameter
from heteropp.models.spec import ModelSpec


@dataclass(frozen=True)
class Summand:
    """A slice of a parameter's gradient, summed over what its ranks worked on; all of them have
    the same values.
    """

    box: Box
    ranks: tuple[int, ...]
    ministage: int
    place: tuple[int, ...]  # where others have the rest of the parameter


@dataclass(frozen=True)
class Delivery:
    """A slice that one rank of home adds to its own."""

    tensor: int
    name: str
    whole: Box  # what the senders have
    senders: tuple[int, ...]
    source: int  # their ministage
    box: Box
    receiver: int
    target: int  # its ministage


def deliveries(home: Plan, other: Plan) -> list[Delivery]:
    """Returns the deliveries that bring each summand of the other plan to one place of home, where
    the sum over home's ranks takes it in.

    It is the place whose ranks have most of the summand already, and among equals the one that is
    sent the least.
    """
    at_home = _summands(home)
    loads: Counter[int] = Counter()  # elements, by rank
    result: list[Delivery] = []
    tensor = 0
    for name, summands in sorted(_summands(other).items()):
        # by place, and by range in the first dimension: packed experts have boxes of their own
        places: dict[tuple[int, ...], dict[Ranges, list[Summand]]] = defaultdict(dict)
        of_rank: dict[int, set[tuple[int, ...]]] = defaultdict(set)
        for target in at_home[name]:
            places[target.place].setdefault(target.box.ranges[:1], []).append(target)
            for rank in target.ranks:
                of_rank[rank].add(target.place)
        for summand in summands:
            near = set[tuple[int, ...]]().union(*(of_rank[rank] for rank in summand.ranks))
            options = [
                _delivered(tensor, name, summand, places[place]) for place in sorted(near or places)
            ]
            best = min(options, key=lambda option: _cost(option, summand, loads))
            for delivery in best:
                if delivery.receiver not in delivery.senders:
                    loads[delivery.receiver] += math.prod(delivery.box.shape)
            result += best
            tensor += 1
    return result


def _delivered(
    tensor: int, name: str, summand: Summand, by_first_range: Mapping[Ranges, Sequence[Summand]]
) -> list[Delivery]:
    near = (
        target
        for range_, targets in by_first_range.items()
        if _meet(range_, summand.box.ranges[:1])
        for target in targets
    )
    result = []
    for target in near:
        common = target.box.intersect(summand.box)
        if common is None:
            continue
        for rank in target.ranks:
            result.append(
                Delivery(
                    tensor,
                    name,
                    summand.box,
                    summand.ranks,
                    summand.ministage,
                    common,
                    rank,
                    target.ministage,
                )
            )
    return result


def _meet(one: Ranges, other: Ranges) -> bool:
    return all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True))


def _cost(option: Sequence[Delivery], summand: Summand, loads: Counter[int]) -> tuple[int, ...]:
    far = [d for d in option if d.receiver not in d.senders]
    elements = sum(math.prod(d.box.shape) for d in far)
    elsewhere = sum(d.target != d.source for d in option)
    return elements, elsewhere, max((loads[d.receiver] for d in far), default=0)


def _summands(plan: Plan) -> dict[str, list[Summand]]:
    """Returns the summands of each parameter's gradient by the parameter's name."""
    found: dict[str, list[Summand]] = defaultdict(list)
    for p, pipeline in enumerate(plan.pipelines):
        for s, ministages in enumerate(ministage_layers(pipeline, plan.schedule)):
            stage = pipeline.stages[s]
            for k, layers in enumerate(ministages):
                for parameter in plan.model.parameters(layers):
                    if not parameter.trains:
                        continue
                    name = plan.model.global_name(parameter.name)
                    having = sorted(_having(plan.model, stage, parameter).items())
                    for (box, own, r), ranks in having:
                        found[name].append(Summand(box, tuple(ranks), k, (p, s, r, k, own)))
    return found


def _having(
    model: ModelSpec, stage: Stage, parameter: Parameter
) -> dict[tuple[Box, int, int], list[int]]:
    """Returns the ranks that have the same part of a parameter's gradient, by its box, its number
    among the summands within the place, and the place: a tensor-parallel group, or as many of them
    as hold all of a layer's experts together.
    """
    turn = stage.ep if model.is_of_experts(parameter) else 1
    is_summand = parameter.gradient_states(stage.tp, stage.sequence_parallel).summands > 1
    found: dict[tuple[Box, int, int], list[int]] = defaultdict(list)
    for i, group in enumerate(stage.groups):
        experts = stage.expert_ranges[i % turn] if turn > 1 else None
        for tp_index, rank in enumerate(group):
            for box in parameter.boxes(stage.tp, tp_index, experts):
                found[box, tp_index if is_summand else 0, i // turn].append(rank)
    return found
