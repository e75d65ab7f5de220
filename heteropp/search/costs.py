"""What stages cost, as functions of their layers: lines for time, planes for memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import NamedTuple

from heteropp.cost.stage_memory import boundary_bytes, stage_traces
from heteropp.cost.stage_time import Memory, StageShape, Time, stage_memory, stage_time
from heteropp.description.chips import ChipSpec
from heteropp.description.profile import ChipProfile, chip_profile
from heteropp.layout.resharding import SENDS_UNDER_WAY
from heteropp.models.spec import ModelSpec
from heteropp.schedule.in_flight import whole_in_flight
from heteropp.schedule.stage_actions import bubble_coefficient
from heteropp.search.space import BatchCut, Degrees, RankKind, Space, StageChoice

MANY = 2.0**20  # micro-batches in flight, beside which the update does not count
ROUNDING_BYTES = 16  # what rounding may hide where memory is interpolated over the layers

Line = tuple[float, float]  # fixed, and per layer
Plane = tuple[float, float, float, float]  # and the same for each micro-batch in flight but one
# of a rank with a micro-batch at work: its bytes without boundary tensors, and those of these, by
# micro-batches not in flight; the last for more
Working = tuple[Plane, tuple[float, ...]]


class StageCost(NamedTuple):
    """What a stage costs as a function of its layers: of several lines the largest counts.

    Its memory is the larger of what it needs at work and what it needs alone (`working`, `alone`).
    """

    time_s: list[Line]  # T of section 4.3.2, of a micro-batch
    update_s: list[Line]  # U of section 4.3.2, of a step
    working: list[Working]  # bytes with a micro-batch at work, of unlike ranks
    alone: list[Line]  # bytes of the update, or of one micro-batch
    measured_s: tuple[tuple[float, float], ...] = ()  # T and U by layers, where they are no lines

    def seconds(self, layers: int) -> tuple[float, float]:
        """Returns T and U of section 4.3.2, in seconds."""
        if self.measured_s:
            return self.measured_s[layers - 1]
        return _largest(self.time_s, layers), _largest(self.update_s, layers)

    def bytes(self, layers: int, in_flight: int, micro_batches: int) -> float:
        needs = [_largest(self.alone, layers)]
        for (fixed, each, kept, kept_each), boundary in self.working:
            working = fixed + layers * each + (in_flight - 1) * (kept + layers * kept_each)
            needs.append(working + boundary[min(micro_batches - in_flight, len(boundary) - 1)])
        return ROUNDING_BYTES + max(needs)


class Costs:
    """What stages of a space cost, each worked out once."""

    def __init__(self, space: Space, made: dict | None = None) -> None:
        """made: of spaces that differ in the order of chip types, in micro-batches or in sequence
        parallelism alone, which share it.
        """
        self.space = space
        self.made: dict = {} if made is None else made

    def of(
        self,
        type_index: int,
        degrees: Degrees,
        share: BatchCut,
        kinds: tuple[RankKind, ...],
        *,
        recompute: bool,
        first: bool,
        last: bool,
    ) -> StageCost:
        cut = self.space.sequence_parallel and degrees.tp > 1
        key = (self.space.types[type_index].name, degrees, share, kinds, first, last, cut)
        if key not in self.made:
            self.made[key] = _stage_costs(
                self.space, type_index, degrees, share, kinds, first, last
            )
        costs: tuple[StageCost, StageCost] = self.made[key]
        return costs[recompute]


def evaluate(costs: Costs, share: BatchCut, stages: Sequence[StageChoice]) -> tuple[float, float]:
    """Returns a step's seconds by section 4.3.2, and the most bytes that a stage lacks, or 0."""
    schedule, count = costs.space.request.schedule, share.micro_batches
    alpha = bubble_coefficient(schedule)
    most_s = sum_s = lacking_bytes = 0.0
    begins = [0] * len(costs.space.types)  # the next stage's first chip, by chip type
    for index, stage in enumerate(stages):
        chips = costs.space.types[stage.type_index]
        kinds = chips.rank_kinds(begins[stage.type_index], stage.degrees)
        begins[stage.type_index] += stage.degrees.chips
        after = len(stages) - 1 - index
        cost = costs.of(
            *(stage.type_index, stage.degrees, share, kinds),
            recompute=stage.recompute,
            first=index == 0,
            last=after == 0,
        )
        time_s, update_s = cost.seconds(stage.layers)
        most_s = max(most_s, (count - alpha) * time_s + update_s)
        sum_s += time_s
        held = whole_in_flight(schedule, count, len(stages), after)
        need = cost.bytes(stage.layers, held, count)
        lacking_bytes = max(lacking_bytes, need - chips.chip.memory.capacity_bytes)
    return most_s + alpha * sum_s, lacking_bytes


def _largest(lines: list[Line], layers: int) -> float:
    return max(fixed + layers * each for fixed, each in lines)


def _stage_costs(
    space: Space,
    type_index: int,
    degrees: Degrees,
    share: BatchCut,
    kinds: tuple[RankKind, ...],
    first: bool,
    last: bool,
) -> tuple[StageCost, StageCost]:
    chips = space.types[type_index]
    shape = StageShape(
        layers=1,
        first=first,
        last=last,
        tp=degrees.tp,
        dp=degrees.copies,
        sequences=share.replicas * share.sequences // degrees.dp,
        zero_stage=space.request.zero_stage,
        optimizer=space.request.optimizer,
        recompute=True,
        schedule=space.request.schedule,
        sequence_parallel=space.sequence_parallel and degrees.tp > 1,
        token_shares=degrees.token_shares or None,
        expert_capacity=space.request.expert_capacity,
    )
    profile = chip_profile(space.request.cluster, chips.name)
    return _shape_costs(space.model, chips.chip, profile, shape, share.micro_batches, kinds)


@lru_cache(maxsize=65536)  # the planners that one asks share them
def _shape_costs(
    model: ModelSpec,
    chip: ChipSpec,
    profile: ChipProfile | None,
    shape: StageShape,
    micro_batches: int,
    kinds: tuple[RankKind, ...],
) -> tuple[StageCost, StageCost]:
    """Returns a stage's costs without and with recompute.

    `kinds` are those of its ranks, of which the slowest counts, and whichever needs most memory.
    """

    shapes = [replace(shape, cp_index=kind.cp_index, spread=kind.spread) for kind in kinds]

    def times(layers: int) -> list[Time]:
        return [
            stage_time(
                *(model, replace(own, layers=layers), chip, kind.inside, kind.across, profile),
                context=kind.context,
                experts=kind.experts,
            )
            for kind, own in zip(kinds, shapes, strict=True)
        ]

    def memory(recompute: bool) -> tuple[list[Working], list[Line]]:
        found = [
            _shape_memory(model, replace(own, recompute=recompute), micro_batches, profile)
            for own in dict.fromkeys(shapes)
        ]
        working = dict.fromkeys(working for working, _ in found)
        return list(working), sorted({line for _, alone in found for line in alone})

    one, two = times(1), times(2)
    all_s = _lines([t.micro_batch_s for t in one], [t.micro_batch_s for t in two])
    plain_s = _lines([_plain_s(t) for t in one], [_plain_s(t) for t in two])
    update_s = _lines([t.step_s for t in one], [t.step_s for t in two])
    costs = [
        StageCost(time_s, update_s, *memory(again))
        for time_s, again in ((plain_s, False), (all_s, True))
    ]
    if profile is not None:  # measured times are sums of blocks of layers
        found = [times(layers) for layers in range(1, model.layers + 1)]
        steps = [max(t.step_s for t in each) for each in found]
        plain = [max(_plain_s(t) for t in each) for each in found]
        whole = [max(t.micro_batch_s for t in each) for each in found]
        costs = [
            cost._replace(measured_s=tuple(zip(measured, steps, strict=True)))
            for cost, measured in zip(costs, (plain, whole), strict=True)
        ]
    return costs[0], costs[1]


@lru_cache(maxsize=65536)  # chips of all types share it
def _shape_memory(
    model: ModelSpec, shape: StageShape, micro_batches: int, profile: ChipProfile | None
) -> tuple[Working, tuple[Line, ...]]:
    """Returns a rank's bytes at work, and alone, as functions of its layers."""

    def bytes_(layers: int, in_flight: float) -> Memory:
        return stage_memory(model, longer(layers), in_flight, micro_batches, profile)

    @cache
    def longer(layers: int) -> StageShape:
        return shape if layers == shape.layers else replace(shape, layers=layers)

    most = min(SENDS_UNDER_WAY + 1, micro_batches - 1)  # with more of them, as many tensors
    one = stage_traces(model, shape, profile).one
    boundary = tuple(
        float(boundary_bytes(model, one, shape, micro_batches - n, micro_batches))
        for n in range(most + 1)  # micro-batches not in flight
    )
    return (_working_plane(bytes_), boundary), _alone_lines(model.layers, bytes_)


def _plain_s(time: Time) -> float:
    return replace(time, recompute_s=0.0).micro_batch_s


def _working_plane(bytes_: Callable[[int, float], Memory]) -> Plane:
    """Returns the bytes with one micro-batch at work, and what each other one in flight keeps."""
    one, two = (bytes_(layers, MANY + 1) for layers in (1, 2))
    working = _line(1, *(found.total - found.kept - found.boundary for found in (one, two)))
    return (*working, *_line(1, one.kept / MANY, two.kept / MANY))


def _alone_lines(layers: int, bytes_: Callable[[int, float], Memory]) -> tuple[Line, ...]:
    """Returns lines whose larger one is the bytes with one micro-batch in flight.

    The update may need more than that micro-batch, so the bytes are the larger of two lines over
    the layers. They are drawn through the first two and the last two numbers of layers.
    """
    ends = sorted({1, max(1, layers - 1)})
    return tuple(_line(at, *(bytes_(at + more, 1).total for more in (0, 1))) for at in ends)


def _lines(ones: list[float], twos: list[float]) -> list[Line]:
    """Returns the unlike lines through the values with one layer and with two."""
    return sorted({_line(1, one, two) for one, two in zip(ones, twos, strict=True)})


def _line(at: int, value: float, next_value: float) -> Line:
    """Returns the line through the values at `at` and at `at + 1` layers."""
    return value - at * (next_value - value), float(next_value - value)
