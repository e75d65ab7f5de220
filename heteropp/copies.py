"""Parameters that stand at several places of a plan: who sends whom its share of their gradients.

Several pipelines hold every layer (AutoHet; Hetu v2), as do pipelines in opposite directions over
the same stages (Chimera), and a tied head is the embedding once more. The gradient of a parameter
is the sum over its copies. Where they are cut unlike, over tensor-parallel ranks or by ZeRO, each
element goes from the rank that keeps it in one copy to those that keep it in another.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations

from heteropp.boxes import Box
from heteropp.layout import layout
from heteropp.parameters import global_name, model_parameters
from heteropp.plan import Plan, Stage, ministage_layers

Part = tuple[int, int, int]  # pipeline, stage and ministage


@dataclass(frozen=True)
class Delivery:
    """A slice of a parameter's gradient that one rank keeps, and another wants."""

    source: int  # rank
    destination: int
    name: str
    box: Box


@dataclass(unsafe_hash=True)
class Exchange:
    """Elements of gradients that a rank sends and is sent for one of its ministages."""

    sent: int = 0
    received: int = 0
    to_self: int = 0  # sent to another of its own ministages
    apart: bool = False  # some copies before its own are summed apart


@lru_cache(maxsize=64)
def exchanges(plan: Plan) -> dict[tuple[int, int], Exchange]:
    """By rank and ministage, of those that stand at several places."""
    everywhere = [parts for parts in holders(plan).values() if len(parts) > 1]
    found: dict[tuple[int, int], Exchange] = defaultdict(Exchange)
    for sender, receiver in {pair for parts in everywhere for pair in permutations(parts, 2)}:
        for delivery in deliveries(plan, sender, receiver):
            size = math.prod(delivery.box.shape)
            source = found[delivery.source, sender[2]]
            if delivery.source == delivery.destination:
                source.to_self += size
                continue
            source.sent += size
            found[delivery.destination, receiver[2]].received += size
    for p, s, k in {part for parts in everywhere for part in parts[2:]}:
        for rank in _ranks(plan.pipelines[p].stages[s]):
            found[rank, k].apart = True
    return dict(found)


def _ranks(stage: Stage) -> Iterable[int]:
    return (rank for replica in stage.replicas for rank in replica.ranks)


def part_layers(plan: Plan) -> dict[Part, tuple[int, int]]:
    return {
        (p, s, k): layers
        for p, pipeline in enumerate(plan.pipelines)
        for s, ministages in enumerate(ministage_layers(pipeline, plan.schedule))
        for k, layers in enumerate(ministages)
    }


def holders(plan: Plan) -> dict[str, list[Part]]:
    """By parameter the places where it stands, in the order in which copies are summed."""
    found: dict[str, list[Part]] = defaultdict(list)
    for part, layers in part_layers(plan).items():
        for parameter in model_parameters(plan.model, layers):
            found[global_name(plan.model, parameter.name)].append(part)
    return dict(found)


def shards(plan: Plan, stage: Stage) -> int:
    """Over how many ranks ZeRO cuts what one rank of a replica would hold."""
    return stage.dp if plan.zero_stage else 1


def deliveries(plan: Plan, sender: Part, receiver: Part) -> list[Delivery]:
    """What the ranks of one place send those of another, of all that stands at both.

    Ranks that keep the same take turns; who wants what it keeps itself takes its own.
    """
    ours, theirs = _keepers(plan, sender), _keepers(plan, receiver)
    result = []
    for name in ours.keys() & theirs.keys():
        for wanted, destinations in theirs[name].items():
            for kept, sources in ours[name].items():
                common = kept.intersect(wanted)
                if common is None:
                    continue
                for i, destination in enumerate(destinations):
                    own = destination if destination in sources else sources[i % len(sources)]
                    result.append(Delivery(own, destination, name, common))
    return sorted(result, key=lambda delivery: (delivery.name, delivery.box))


def _keepers(plan: Plan, part: Part) -> dict[str, dict[Box, list[int]]]:
    """By parameter, the boxes that ranks keep once the replicas have summed theirs."""
    p, s, k = part
    stage = plan.pipelines[p].stages[s]
    layers = ministage_layers(plan.pipelines[p], plan.schedule)[s][k]
    count = shards(plan, stage)
    found: dict[str, dict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
    for tp_index in range(stage.tp):
        held = layout(plan.model, layers, stage.tp, tp_index, count)
        for r, replica in enumerate(stage.replicas):
            for piece in held.pieces(r % count):
                found[piece.name][piece.box].append(replica.ranks[tp_index])
    return found
