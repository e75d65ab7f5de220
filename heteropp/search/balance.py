"""Numbers for a skeleton: sequences for its replicas, layers for its stages, micro-batches.

Each is dealt out one by one to where it delays least, as AutoHet does with layers (section III-D),
within the memory that is estimated; so the faster of two pipelines takes more micro-batches (Hetu
v2, appendix A.3).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import NamedTuple

from heteropp.cost.communication import NO_LINK
from heteropp.cost.planned import slowest_link
from heteropp.cost.stage_time import StageShape, all_reduce_s, stage_memory, stage_time
from heteropp.description.cluster import Cluster, Link
from heteropp.description.plan import INTERLEAVING, Pipeline, Plan, Replica, Stage
from heteropp.description.profile import ProfileError, chip_profile
from heteropp.schedule.in_flight import whole_in_flight
from heteropp.search.costs import Plane
from heteropp.search.planner import Candidate
from heteropp.search.skeletons import LARGE, Ranks, Skeleton

SIZES = 4  # of a micro-batch, tried for each skeleton
LARGE_SIZES = 2  # and where there are many skeletons


class Unit(NamedTuple):
    """A tensor-parallel group, as far as time and memory depend on it."""

    node: int  # the first that is alike
    tp: int
    inside: Link


class ReplicaKey(NamedTuple):
    """What a replica's time and memory depend on, but for its layers."""

    unit: Unit
    sequences: int
    first: bool
    last: bool
    dp: int
    recompute: bool
    copies: int


class Sketch(NamedTuple):
    """A plan to be."""

    skeleton: Skeleton
    micro_batch: int


class _Dealt(NamedTuple):
    """Layers and micro-batches as dealt out: `seats` by pipeline, stage and replica, `layers` by
    pipeline and stage, `micro_batches` by pipeline.
    """

    cost_s: float
    seats: list[list[list[ReplicaKey]]]
    layers: list[list[int]]
    micro_batches: list[int]


class Balance:
    """Plans like another one (its model, global batch, schedule, ZeRO stage) on a cluster."""

    def __init__(self, cluster: Cluster, like: Plan) -> None:
        self.cluster, self.like = cluster, like
        self.ministages = 1
        if like.schedule in INTERLEAVING and like.pipelines:
            self.ministages = like.pipelines[0].stages[0].ministages
        self._units: dict[Ranks, Unit] = {}
        self._lines: dict[ReplicaKey, tuple[float, float]] = {}
        self._planes: dict[ReplicaKey, Plane] = {}

    def power(self, ranks: Ranks) -> float:
        """Layers a second of a tensor-parallel group; 0 where it was not measured."""
        try:
            return 1 / self._share_s(self._unit(ranks), 1)
        except ProfileError:
            return 0.0

    def bound_s(self) -> float:
        """What a step takes at least: all layers of all sequences, if every chip worked always.

        0 where a measured cluster does not tell.
        """
        sequences = self.like.global_batch
        try:
            rates = [
                len(node.ranks) * sequences / self._share_s(self._unit((node.ranks[0],)), sequences)
                for node in self.cluster.nodes
            ]
        except ProfileError:
            return 0.0
        return sequences * self.like.model.layers / sum(rates)

    def sketches(self, skeleton: Skeleton) -> Iterator[Sketch]:
        """Yields a sketch of the skeleton for each of a few micro-batch sizes."""
        batch, most = self.like.global_batch, max(len(stage) for p in skeleton for stage in p)
        if max(map(len, skeleton)) > self.like.model.layers:
            return
        sizes = [n for n in range(most, batch // len(skeleton) + 1) if batch % n == 0]
        few = LARGE_SIZES if self.cluster.world_size >= LARGE else SIZES
        for size in sorted({*sizes[: few - 1], *sizes[-1:]}):
            yield Sketch(skeleton, size)

    def estimate_s(self, sketch: Sketch) -> float:
        """Returns the seconds of a step, without limits of memory and without the messages between
        stages.
        """
        dealt = self._deal(sketch, recompute=False, capped=False)
        assert dealt is not None
        return dealt.cost_s

    def candidate(self, sketch: Sketch, capped: bool = True) -> Candidate | None:
        """A plan that memory holds, by its estimate; it recomputes where it has to.

        capped: False: whatever memory holds, with layers dealt by time alone.
        """
        for recompute in (False, True):
            if dealt := self._deal(sketch, recompute, capped):
                parts = zip(
                    dealt.micro_batches, sketch.skeleton, dealt.seats, dealt.layers, strict=True
                )
                plan = replace(
                    self.like,
                    micro_batch=sketch.micro_batch,
                    pipelines=tuple(
                        Pipeline(micro_batches=n, stages=self._stages(groups, seats, layers))
                        for n, groups, seats, layers in parts
                    ),
                    profile=None,
                    prediction=None,
                )
                return Candidate(plan, dealt.cost_s)
        return None

    def _deal(self, sketch: Sketch, recompute: bool, capped: bool) -> _Dealt | None:
        """Deals out layers to stages and micro-batches to pipelines, so that the slowest takes
        least.

        capped: memory limits a stage's layers; None where they do not fit.
        """
        count = self.like.global_batch // sketch.micro_batch
        seats, layers, ends = [], [], []
        for groups in sketch.skeleton:
            own = self._seats(groups, sketch.micro_batch, recompute, len(sketch.skeleton))
            seconds = [self._stage_s(stage) for stage in own]
            most = self._most(own, count) if capped else None
            if most and (min(most) < 1 or sum(most) < self.like.model.layers):
                return None
            held = deal(self.like.model.layers, seconds, most)
            times = [of(n) for of, n in zip(seconds, held, strict=True)]
            ends.append(_end_s(sum(times), max(times)))
            seats.append(own)
            layers.append(held)
        taken = deal(count, ends)
        slowest_s = max(end_s(n) for end_s, n in zip(ends, taken, strict=True))
        return _Dealt(slowest_s + self._sum_s(sketch.skeleton), seats, layers, taken)

    def _seats(
        self, groups: Sequence[Sequence[Ranks]], micro_batch: int, recompute: bool, copies: int
    ) -> list[list[ReplicaKey]]:
        """Returns the seats of a pipeline by stage and replica, each with its share of the
        micro-batch.
        """
        last = len(groups) - 1
        result = []
        for s, replicas in enumerate(groups):
            units = [self._unit(ranks) for ranks in replicas]
            ends, dp = (s == 0, s == last), len(units)
            result.append(
                [
                    ReplicaKey(unit, share, *ends, dp, recompute, copies)
                    for unit, share in zip(units, self._shares(units, micro_batch), strict=True)
                ]
            )
        return result

    def _shares(self, units: list[Unit], micro_batch: int) -> list[int]:
        if len(set(units)) == 1:
            share, rest = divmod(micro_batch, len(units))
            return [share + (i < rest) for i in range(len(units))]
        return deal(micro_batch, [partial(self._share_s, unit) for unit in units])

    def _most(self, seats: list[list[ReplicaKey]], count: int) -> list[int]:
        """Returns how many layers each stage's memory has room for."""
        result = []
        for s, own in enumerate(seats):
            held = whole_in_flight(self.like.schedule, count, len(seats), len(seats) - 1 - s)
            result.append(min(self._most_layers(seat, held) for seat in set(own)))
        return result

    def _stage_s(self, seats: list[ReplicaKey]) -> Callable[[int], float]:
        """Returns the seconds of the slowest replica's micro-batch, as a function of its layers."""
        lines = [self._line(seat) for seat in set(seats)]
        return lambda layers: max(one_s + (layers - 1) * more_s for one_s, more_s in lines)

    def _share_s(self, unit: Unit, sequences: int) -> float:
        return self._line(ReplicaKey(unit, sequences, False, False, 1, False, 1))[0]

    def _line(self, seat: ReplicaKey) -> tuple[float, float]:
        """Returns the seconds of a micro-batch with one layer, and those that each more adds."""
        key = seat._replace(dp=1, copies=1)  # neither changes the time of a micro-batch
        if key not in self._lines:
            node = self.cluster.nodes[seat.unit.node]
            one_s, two_s = (
                stage_time(
                    self.like.model,
                    self._shape(key, layers),
                    node.chip,
                    seat.unit.inside,
                    NO_LINK,
                    chip_profile(self.cluster, node.chip_name),
                ).micro_batch_s
                for layers in (1, 2)
            )
            self._lines[key] = one_s, two_s - one_s
        return self._lines[key]

    def _most_layers(self, seat: ReplicaKey, held: int) -> int:
        """Estimates how many layers memory has room for with `held` micro-batches in flight."""
        fixed, each, kept, kept_each = self._plane(seat)
        capacity_bytes = self.cluster.nodes[seat.unit.node].chip.memory.capacity_bytes
        room_bytes = capacity_bytes - fixed - (held - 1) * kept
        if room_bytes < 0:
            return 0
        return min(self.like.model.layers, int(room_bytes / (each + (held - 1) * kept_each)))

    def _plane(self, seat: ReplicaKey) -> Plane:
        """Returns the coefficients of a seat's bytes over layers and micro-batches in flight, as
        search.costs has them.
        """
        if seat not in self._planes:
            node = self.cluster.nodes[seat.unit.node]
            profile = chip_profile(self.cluster, node.chip_name)
            model, count = self.like.model, self.like.global_batch
            layers = model.layers

            def line(in_flight: int) -> tuple[float, float]:
                shapes = (self._shape(seat, n) for n in (1, layers + 1))
                needs = (stage_memory(model, shape, in_flight, count, profile) for shape in shapes)
                one, all_ = (need.total for need in needs)
                each = (all_ - one) / layers
                return one - each, each

            (fixed, each), (fixed_2, each_2) = line(1), line(2)
            self._planes[seat] = fixed, each, fixed_2 - fixed, each_2 - each
        return self._planes[seat]

    def _shape(self, seat: ReplicaKey, layers: int) -> StageShape:
        return StageShape(
            layers=layers,
            first=seat.first,
            last=seat.last,
            tp=seat.unit.tp,
            dp=seat.dp,
            sequences=seat.sequences,
            zero_stage=self.like.zero_stage,
            optimizer=self.like.optimizer,
            recompute=seat.recompute,
            schedule=self.like.schedule,
            copies=seat.copies,
        )

    def _sum_s(self, skeleton: Skeleton) -> float:
        """Estimates the seconds of summing a stage's gradients over all ranks that hold them."""
        slowest_s = 0.0
        for stages in skeleton:
            for stage in stages:
                share_bytes = self._gradient_bytes / len(stages) / len(stage[0])
                copies = len(stage) * len(skeleton)
                slowest_s = max(slowest_s, all_reduce_s(share_bytes, copies, self._slowest_link))
        return slowest_s

    @cached_property
    def _gradient_bytes(self) -> int:
        model = self.like.model
        width = max(4, model.dtype_bytes)
        return width * sum(math.prod(p.shape) for p in model.all_parameters if p.trains)

    @cached_property
    def _slowest_link(self) -> Link:
        first = self.cluster.nodes[0].ranks[0]
        others = (node.ranks[-1] for node in self.cluster.nodes if node.ranks[-1] != first)
        links = (self.cluster.link(first, other) for other in others)
        return min(links, key=lambda link: link.bytes_per_s, default=NO_LINK)

    def _stages(
        self, groups: Sequence[Sequence[Ranks]], seats: list[list[ReplicaKey]], layers: list[int]
    ) -> tuple[Stage, ...]:
        spans = pairwise(accumulate(layers, initial=0))
        return tuple(
            Stage(
                layers=span,
                recompute=own[0].recompute,
                ministages=self.ministages,
                replicas=tuple(
                    Replica(
                        ranks=ranks,
                        chip=self.cluster.nodes[seat.unit.node].chip_name,
                        batch_share=seat.sequences,
                    )
                    for ranks, seat in zip(replicas, own, strict=True)
                ),
            )
            for replicas, own, span in zip(groups, seats, spans, strict=True)
        )

    def _unit(self, ranks: Ranks) -> Unit:
        if ranks not in self._units:
            inside = slowest_link(self.cluster, ranks[0], ranks)
            node = self._alike[self.cluster.node_index(ranks[0])]
            self._units[ranks] = Unit(node, len(ranks), inside)
        return self._units[ranks]

    @cached_property
    def _alike(self) -> list[int]:
        """The first node with the same chip type, for each node."""
        first: dict[str, int] = {}
        return [first.setdefault(node.chip_name, i) for i, node in enumerate(self.cluster.nodes)]


def deal(
    total: int, seconds: Sequence[Callable[[int], float]], most: Sequence[int] | None = None
) -> list[int]:
    """Returns how many of `total` items each taker gets, at least 1, so that the slowest is done
    soonest.

    seconds: each taker's time as a growing function of its items. most: the most items that each
    may take, at least `total` together.
    """
    taken = [1] * len(seconds)
    ahead = [(of(2), i) for i, of in enumerate(seconds) if most is None or most[i] > 1]
    heapq.heapify(ahead)
    for _ in range(total - len(seconds)):
        _, i = heapq.heappop(ahead)
        taken[i] += 1
        if most is None or taken[i] < most[i]:
            heapq.heappush(ahead, (seconds[i](taken[i] + 1), i))
    return taken


def _end_s(fill_s: float, turn_s: float) -> Callable[[int], float]:
    """When a pipeline ends: its micro-batches pass all stages in fill_s, the slowest in turn_s."""
    return lambda micro_batches: fill_s + (micro_batches - 1) * turn_s
