"""Parameters that stand at several places of a plan: who sends whom its share of their gradients.

Several pipelines hold every layer (AutoHet; Hetu v2), as do pipelines in opposite directions over
the same stages (Chimera), and a tied head is the embedding once more. The gradient of a parameter
is the sum over its copies: what a rank keeps is a summand of it, and the sum is what it wants. Who
sends whom what is the resolver's answer, also where copies are cut unlike, over tensor-parallel
ranks or by ZeRO. It is given boxes, not annotations: ZeRO's shards have none (layout/flat_buffer),
and one rank may hold two copies.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container
from dataclasses import dataclass
from functools import lru_cache

from heteropp.description.plan import Plan, Stage, ministage_layers
from heteropp.layout.boxes import Box
from heteropp.layout.flat_buffer import layout
from heteropp.layout.hspmd.routing import HeldBox, Round, Wanted, route, volume_bytes
from heteropp.models.spec import ModelSpec

Part = tuple[int, int, int]  # pipeline, stage and ministage


MINISTAGES = 1 << 10  # more than any stage has


@dataclass(unsafe_hash=True)
class Exchange:
    """Elements of gradients that a rank sends and is sent for one of its ministages."""

    sent: int = 0
    received: int = 0
    to_self: int = 0  # sent to another of its own ministages


def exchanges(plan: Plan) -> dict[tuple[int, int], Exchange]:
    """Returns, by rank and ministage, the gradient elements that are exchanged for the parameters
    that stand at several places of the plan.
    """
    return {} if _stands_once(plan) else _exchanges(plan)


@lru_cache(maxsize=64)
def _exchanges(plan: Plan) -> dict[tuple[int, int], Exchange]:
    found: dict[tuple[int, int], Exchange] = defaultdict(Exchange)
    for places in shared(plan):
        for (source, destination), size in volume_bytes([sums(plan, places, 1)]).items():
            (sender, k), (receiver, j) = divmod(source, MINISTAGES), divmod(destination, MINISTAGES)
            if sender == receiver:
                found[sender, k].to_self += size
            else:
                found[sender, k].sent += size
                found[receiver, j].received += size
    return dict(found)


def seat(rank: int, ministage: int) -> int:
    """Returns the number that stands for one ministage of a rank in the routing."""
    return rank * MINISTAGES + ministage


def sums(plan: Plan, places: tuple[Part, ...], itemsize: int) -> Round:
    """How seats sum the gradients of the parameters that stand at just these places.

    Each sums what it keeps, in the order of the places, all at once: beside the backward there is
    no second round. Tensors are numbered as the model's parameters.
    """
    number, names = numbers(plan.model), set(shared(plan)[places])
    kept = [
        (number[name], seat(rank, part[2]), box, part)
        for part in places
        for name, by_box in _holders(plan, part, names).items()
        for box, ranks in by_box.items()
        for rank in ranks
    ]
    rounds = route(
        [HeldBox(*one) for one in kept],
        [Wanted(tensor, own, box, places) for tensor, own, box, _ in kept],
        [itemsize] * len(number),
        _nearness,
        sums_shared=False,
    )
    return rounds[0]


def numbers(model: ModelSpec) -> dict[str, int]:
    """Returns the tensor number of each parameter in the routing, by name."""
    return {parameter.name: i for i, parameter in enumerate(model.all_parameters)}


def _nearness(source: int, destination: int) -> float:
    """Returns the speed of a link to the router: infinite between ministages of one rank, which
    need no message.
    """
    return math.inf if source // MINISTAGES == destination // MINISTAGES else 1.0


def part_layers(plan: Plan) -> dict[Part, tuple[int, int]]:
    return {
        (p, s, k): layers
        for p, pipeline in enumerate(plan.pipelines)
        for s, ministages in enumerate(ministage_layers(pipeline, plan.schedule))
        for k, layers in enumerate(ministages)
    }


@lru_cache(maxsize=64)
def holders(plan: Plan) -> dict[str, list[Part]]:
    """Returns, by parameter, the places where it stands, in the order in which its copies are
    summed. The first of them speaks for it.
    """
    found: dict[str, list[Part]] = defaultdict(list)
    for part, layers in part_layers(plan).items():
        for parameter in plan.model.parameters(layers):
            found[plan.model.global_name(parameter.name)].append(part)
    return dict(found)


def shared(plan: Plan) -> dict[tuple[Part, ...], list[str]]:
    """Returns the parameters that train and stand at several places, by those places, in the
    model's order.
    """
    return {} if _stands_once(plan) else _shared(plan)


def _stands_once(plan: Plan) -> bool:
    """Whether one place has each parameter, as is seen at once; a search asks for many plans."""
    return len(plan.pipelines) == 1 and plan.schedule != "chimera" and not plan.model.tied


@lru_cache(maxsize=64)
def _shared(plan: Plan) -> dict[tuple[Part, ...], list[str]]:
    everywhere = holders(plan)
    found: dict[tuple[Part, ...], list[str]] = defaultdict(list)
    for parameter in plan.model.all_parameters:
        if parameter.trains and len(parts := everywhere[parameter.name]) > 1:
            found[tuple(parts)].append(parameter.name)
    return dict(found)


def shards(plan: Plan, stage: Stage) -> int:
    """Returns the number of ranks over which ZeRO shards what one rank of a replica would hold:
    the stage's replicas, or 1 without ZeRO.
    """
    return stage.dp if plan.zero_stage else 1


def _holders(plan: Plan, part: Part, names: Container[str]) -> dict[str, dict[Box, list[int]]]:
    """Returns, by parameter, the boxes whose gradients remain once the replicas of one place have
    summed theirs, each with the ranks that keep it.
    """
    p, s, k = part
    stage = plan.pipelines[p].stages[s]
    layers = ministage_layers(plan.pipelines[p], plan.schedule)[s][k]
    count = shards(plan, stage)
    found: dict[str, dict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
    for tp_index in range(stage.tp):
        held = layout(plan.model, layers, stage.tp, tp_index, count)
        for turn, rank in enumerate(stage.peers(tp_index)):
            for piece in held.pieces(turn % count):
                if piece.name in names:
                    found[piece.name][piece.box].append(rank)
    return found
