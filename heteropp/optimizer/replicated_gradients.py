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
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from heteropp.description.plan import Plan, ministage_layers
from heteropp.description.sections import Section, sections
from heteropp.layout.boxes import Box
from heteropp.layout.flat_buffer import Experts, layout
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
    for places, names in shared(plan).items():
        copies = tuple(_copy(plan, part) for part in places)
        ranks = sorted({rank for copy in copies for rank in copy.ranks})
        number = {rank: i for i, rank in enumerate(ranks)}
        renumbered = tuple(copy.renumbered(number) for copy in copies)
        for (source, destination), size in _volumes(plan.model, tuple(names), renumbered):
            (sender, k), (receiver, j) = divmod(source, MINISTAGES), divmod(destination, MINISTAGES)
            if sender == receiver:
                found[ranks[sender], k].to_self += size
            else:
                found[ranks[sender], k].sent += size
                found[ranks[receiver], j].received += size
    return dict(found)


@lru_cache(maxsize=4096)
def _volumes(
    model: ModelSpec, names: tuple[str, ...], copies: tuple[_HeldCopy, ...]
) -> list[tuple[tuple[int, int], int]]:
    """Returns the elements that each seat sends another; plans of a search have much in common."""
    return list(volume_bytes([_sums(model, names, copies, 1)]).items())


@dataclass(frozen=True)
class _HeldCopy:
    """One place of some parameters: all that its part in their sums depends on."""

    layers: tuple[int, int]
    ministage: int
    zero_stage: int
    sections: tuple[Section, ...]

    @property
    def ranks(self) -> list[int]:
        """All of its ranks, which the first section has."""
        return [rank for ranks in self.sections[0].peers for rank in ranks]

    def renumbered(self, number: Mapping[int, int]) -> _HeldCopy:
        return replace(
            self,
            sections=tuple(
                replace(
                    section,
                    peers=tuple(tuple(number[rank] for rank in ranks) for ranks in section.peers),
                )
                for section in self.sections
            ),
        )


def _copy(plan: Plan, part: Part) -> _HeldCopy:
    p, s, k = part
    stage = plan.pipelines[p].stages[s]
    layers = ministage_layers(plan.pipelines[p], plan.schedule)[s][k]
    return _HeldCopy(layers, k, plan.zero_stage, sections(stage))


def seat(rank: int, ministage: int) -> int:
    """Returns the number that stands for one ministage of a rank in the routing."""
    return rank * MINISTAGES + ministage


def sums(plan: Plan, places: tuple[Part, ...], itemsize: int) -> Round:
    """How seats sum the gradients of the parameters that stand at just these places.

    Each sums what it keeps, in the order of the places, all at once: beside the backward there is
    no second round. Tensors are numbered as the model's parameters.
    """
    names = tuple(shared(plan)[places])
    return _sums(plan.model, names, tuple(_copy(plan, part) for part in places), itemsize)


def _sums(
    model: ModelSpec, names: tuple[str, ...], copies: tuple[_HeldCopy, ...], itemsize: int
) -> Round:
    number, wanted = numbers(model), set(names)
    kept = [
        (number[name], seat(rank, copy.ministage), box, (place,))
        for place, copy in enumerate(copies)
        for name, by_box in _holders(model, copy, wanted).items()
        for box, ranks in by_box.items()
        for rank in ranks
    ]
    places = tuple((place,) for place in range(len(copies)))
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


def holders(plan: Plan) -> Mapping[str, Sequence[Part]]:
    """Returns, by parameter, the places where it stands, in the order in which its copies are
    summed. The first of them speaks for it.
    """
    return _standing(plan.model, tuple(part_layers(plan).items()))


@lru_cache(maxsize=64)
def _standing(
    model: ModelSpec, parts: tuple[tuple[Part, tuple[int, int]], ...]
) -> dict[str, list[Part]]:
    found: dict[str, list[Part]] = defaultdict(list)
    for part, layers in parts:
        for name in _names(model, layers):
            found[name].append(part)
    return dict(found)


@lru_cache(maxsize=4096)
def _names(model: ModelSpec, layers: tuple[int, int]) -> tuple[str, ...]:
    """Returns the global names of the parameters of layers [first, last)."""
    return tuple(model.global_name(parameter.name) for parameter in model.parameters(layers))


def shared(plan: Plan) -> Mapping[tuple[Part, ...], Sequence[str]]:
    """Returns the parameters that train and stand at several places, by those places, in the
    model's order.
    """
    return {} if _stands_once(plan) else _shared(plan.model, tuple(part_layers(plan).items()))


def _stands_once(plan: Plan) -> bool:
    """Whether one place has each parameter, as is seen at once; a search asks for many plans."""
    return len(plan.pipelines) == 1 and plan.schedule != "chimera" and not plan.model.tied


@lru_cache(maxsize=64)
def _shared(
    model: ModelSpec, parts: tuple[tuple[Part, tuple[int, int]], ...]
) -> dict[tuple[Part, ...], list[str]]:
    everywhere = _standing(model, parts)
    found: dict[tuple[Part, ...], list[str]] = defaultdict(list)
    for parameter in model.all_parameters:
        if parameter.trains and len(standing := everywhere[parameter.name]) > 1:
            found[tuple(standing)].append(parameter.name)
    return dict(found)


def _holders(
    model: ModelSpec, copy: _HeldCopy, names: Container[str]
) -> dict[str, dict[Box, list[int]]]:
    """Returns, by parameter, the boxes whose gradients remain once the replicas of one place have
    summed theirs, each with the ranks that keep it.
    """
    found: dict[str, dict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
    for section in copy.sections:
        tp, shards = len(section.peers), section.shards(copy.zero_stage)
        for tp_index, ranks in enumerate(section.peers):
            of = model, copy.layers, tp, tp_index, shards, section.experts
            for turn, rank in enumerate(ranks):
                for name, box in _shard_boxes(*of, turn % shards):
                    if name in names:
                        found[name][box].append(rank)
    return found


@lru_cache(maxsize=1024)
def _shard_boxes(
    model: ModelSpec,
    layers: tuple[int, int],
    tp: int,
    tp_index: int,
    shards: int,
    experts: Experts,
    shard: int,
) -> tuple[tuple[str, Box], ...]:
    """Returns the boxes of a shard of a layout, each with its parameter's name."""
    held = layout(model, layers, tp, tp_index, shards, experts)
    return tuple([(piece.name, piece.box) for piece in held.pieces(shard)])
