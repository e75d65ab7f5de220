"""From one plan's layout to another's within a step: parameters there, gradients back.

The plan that updates the parameters is home. In other plans' steps copies of them are used, and
gradients are summed; both move in fused batched send/recv (Hetu v2, section 6.2).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heteropp.boxes import Box
from heteropp.hspmd.exchange import Piece, exchange
from heteropp.hspmd.routing import Held, Wanted, route
from heteropp.layout import Entry, layout
from heteropp.parameters import global_name, model_parameters
from heteropp.plan import Plan, Stage, ministage_layers
from heteropp.training.step.flat import FlatBuffers


def alike(home: Plan, other: Plan, rank: int) -> bool:
    """Whether a rank, and those it shares a replica with, have the same slices in both plans.

    Then they need no copies, and the gradients are summed where they are wanted.
    """

    def found(plan: Plan) -> tuple[object, ...]:
        p, s, r, _ = plan.place(rank)
        stage = plan.pipelines[p].stages[s]
        layers = ministage_layers(plan.pipelines[p], plan.schedule)[s]
        return stage.replicas[r].ranks, layers, stage.sequence_parallel

    return found(home) == found(other)


class Parameters:
    """Of one rank: brings another plan's copies up to date."""

    def __init__(
        self,
        home: Plan,
        other: Plan,
        rank: int,
        ours: Sequence[FlatBuffers],
        theirs: Sequence[FlatBuffers],
    ) -> None:
        self.rank = rank
        names = {
            global_name(home.model, p.name): i for i, p in enumerate(model_parameters(home.model))
        }
        ranks = range(home.world_size)
        held = [Held(names[e.global_name], r, e.box) for r in ranks for e in _entries(home, r)]
        wanted = [
            Wanted(names[entry.global_name], r, entry.box)
            for r in ranks
            if not alike(home, other, r)
            for entry in _entries(other, r)
        ]
        itemsizes = [home.model.dtype_bytes] * len(model_parameters(home.model))
        self.rounds = route(held, list(dict.fromkeys(wanted)), itemsizes)

        def pieces(flats: Sequence[FlatBuffers]) -> list[Piece]:
            return [
                Piece(names[entry.global_name], entry.box, _of(flat.values, entry))
                for flat in flats
                for entry in flat.entries
            ]

        self.held = pieces(ours)
        self.wanted = [] if alike(home, other, rank) else pieces(theirs)

    @torch.no_grad()
    def move(self) -> None:
        exchange(self.rounds, self.rank, self.held, self.wanted)


class Gradients:
    """Of one rank: adds what another plan has summed of gradients to what home has."""

    def __init__(
        self,
        home: Plan,
        other: Plan,
        rank: int,
        ours: Sequence[FlatBuffers],
        theirs: Sequence[FlatBuffers],
    ) -> None:
        self.rank, self.ours, self.theirs = rank, ours, theirs
        self.wide = getattr(torch, home.model.wide_dtype)
        found = deliveries(home, other)
        remote = [d for d in found if d.receiver not in d.senders]
        held = {Held(d.tensor, sender, d.whole) for d in remote for sender in d.senders}
        wanted = [Wanted(d.tensor, d.receiver, d.box) for d in remote]
        count = max((d.tensor for d in remote), default=-1) + 1
        itemsizes = [self.wide.itemsize] * count
        self.rounds = route(sorted(held, key=lambda h: (h.tensor, h.rank)), wanted, itemsizes)
        self.sent = [d for d in remote if rank in d.senders]
        skipped = alike(home, other, rank)  # summed there already
        self.added = [
            d for d in found if d.receiver == rank and not (skipped and rank in d.senders)
        ]

    @torch.no_grad()
    def move(self) -> None:
        held = [
            Piece(d.tensor, d.whole, self._gradient(self.theirs[d.source], d.name))
            for d in self.sent
        ]
        wanted = {
            (d.tensor, d.box): torch.empty(
                d.box.shape, dtype=self.wide, device=self.theirs[0].values.device
            )
            for d in self.added
            if self.rank not in d.senders
        }
        exchange(self.rounds, self.rank, held, [Piece(t, box, v) for (t, box), v in wanted.items()])
        for d in self.added:  # in one order on all ranks that keep the same
            come = wanted.get((d.tensor, d.box))
            if come is None:
                whole = self._gradient(self.theirs[d.source], d.name)
                come = whole[d.box.within(d.whole)]
            target = self.ours[d.target]
            entry = _entry(target, d.name)
            self._gradient(target, d.name)[d.box.within(entry.box)].add_(come)

    def _gradient(self, flat: FlatBuffers, name: str) -> Tensor:
        assert flat.gradients is not None
        return _of(flat.gradients, _entry(flat, name))


@dataclass(frozen=True)
class Summand:
    """A slice of a parameter's gradient that ranks have alike, summed over what they worked on."""

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
    """Each summand of the other plan goes to one place of home, which sums it with all of them.

    To where the most of it is already, else to whoever is sent the least.
    """
    everywhere: dict[str, dict[tuple[int, ...], list[Summand]]] = {}
    for name, summands in _summands(home).items():
        everywhere[name] = defaultdict(list)
        for summand in summands:
            everywhere[name][summand.place].append(summand)
    loads: Counter[int] = Counter()  # elements, by rank
    result: list[Delivery] = []
    tensor = 0
    for name, summands in sorted(_summands(other).items()):
        for summand in summands:
            options = [
                _delivered(tensor, name, summand, targets) for targets in everywhere[name].values()
            ]
            best = min(options, key=lambda option: _cost(option, summand, loads))
            for delivery in best:
                if delivery.receiver not in delivery.senders:
                    loads[delivery.receiver] += math.prod(delivery.box.shape)
            result += best
            tensor += 1
    return result


def _delivered(
    tensor: int, name: str, summand: Summand, targets: Sequence[Summand]
) -> list[Delivery]:
    result = []
    for target in targets:
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


def _cost(option: Sequence[Delivery], summand: Summand, loads: Counter[int]) -> tuple[int, ...]:
    far = [d for d in option if d.receiver not in d.senders]
    elements = sum(math.prod(d.box.shape) for d in far)
    elsewhere = sum(d.target != d.source for d in option)
    return elements, elsewhere, max((loads[d.receiver] for d in far), default=0)


def _summands(plan: Plan) -> dict[str, list[Summand]]:
    """By parameter; the sum of all is its gradient."""
    found: dict[str, list[Summand]] = defaultdict(list)
    for p, pipeline in enumerate(plan.pipelines):
        for s, ministages in enumerate(ministage_layers(pipeline, plan.schedule)):
            stage = pipeline.stages[s]
            for k, layers in enumerate(ministages):
                for t in range(stage.tp):
                    for entry in layout(plan.model, layers, stage.tp, t, 1).entries:
                        for r, ranks, extra in _having(stage, t, entry):
                            place = (p, s, r, k, *extra)
                            found[entry.global_name].append(Summand(entry.box, ranks, k, place))
    return found


def _having(
    stage: Stage, tp_index: int, entry: Entry
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """By replica, the ranks that have a parameter's gradient alike, as the tp-th of them knows it.

    Where rows are cut instead of the parameter each rank has a summand of the whole.
    """
    for r, replica in enumerate(stage.replicas):
        if entry.sharded or stage.tp == 1:
            yield r, (replica.ranks[tp_index],), ()
        elif stage.sequence_parallel:
            yield r, (replica.ranks[tp_index],), (tp_index,)
        elif tp_index == 0:
            yield r, replica.ranks, ()


def _entries(plan: Plan, rank: int) -> Iterator[Entry]:
    p, s, _, t = plan.place(rank)
    for layers in ministage_layers(plan.pipelines[p], plan.schedule)[s]:
        yield from layout(plan.model, layers, plan.pipelines[p].stages[s].tp, t, 1).entries


def _entry(flat: FlatBuffers, name: str) -> Entry:
    return next(entry for entry in flat.entries if entry.global_name == name)


def _of(buffer: Tensor, entry: Entry) -> Tensor:
    return buffer[entry.first : entry.last].view(entry.box.shape)
