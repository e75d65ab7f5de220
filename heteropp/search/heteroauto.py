"""HeteroAuto's own search, as published (section 4.3.3), to hold the exact planner against.

A depth-first search over the data-parallel degree and, type by type in order of memory, the
tensor-parallel degree and recompute; a heuristic deals out the layers. It runs twice: first with
every chip type whole, to find the data-parallel degree; then, with that degree, with the types cut
into groups of 128 chips, each with degrees of its own. Of groups of one type, an earlier one has
no smaller tensor-parallel degree, and recomputes if a later one does (the second rule is our
reading: earlier stages hold more micro-batches, and without it the published times are out of
reach). A step is a choice of degrees whose layers are dealt out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from heteropp.schedule.in_flight import whole_in_flight
from heteropp.schedule.stage_actions import bubble_coefficient
from heteropp.search.costs import Costs, StageCost, evaluate
from heteropp.search.exact import search as exact
from heteropp.search.planner import Candidate, Request, Result, SearchError
from heteropp.search.space import BatchCut, ChipGroup, Degrees, Space, StageChoice
from heteropp.search.tables import check_schedule

RUNNERS_UP = 3


@dataclass(frozen=True)
class Dealt:
    """A whole choice, with the layers of each stage of each group."""

    cost_s: float
    share: BatchCut
    settings: tuple[Setting, ...]
    layers: tuple[int, ...]


def search(request: Request) -> Result:
    """The best plan found. Raises SearchError, or DoesNotFitError where none found fits."""
    check_schedule("heteroauto", request)
    usual = replace(request, uneven_layers=False, stage_degrees=False)
    space = Space(replace(usual, context_parallel=None, expert_parallel=None))
    costs = Costs(space)
    whole, *cut = space.groupings
    walks = [_Walk(space, costs, share, whole) for share in space.shares]
    dealt = [found for walk in walks if (found := walk.best())]
    if not dealt:
        exact(space.request)  # says what is nearest, if nothing fits
        raise SearchError("heteroauto deals out no layers that fit; planner exact finds a plan")
    first = min(dealt, key=lambda found: found.cost_s)
    second = [_Walk(space, costs, first.share, groups) for groups in cut]
    dealt += [found for walk in second if (found := walk.best())]
    candidates = sorted(
        (_candidate(space, costs, found) for found in dealt), key=lambda found: found.cost_s
    )
    # it proves nothing itself, and both its stages are in the exact planner's space
    bound_s = min(candidates[0].cost_s, exact(space.request).lower_bound_s)
    steps = sum(walk.steps for walk in (*walks, *second))
    return Result("heteroauto", candidates[0], candidates[1 : 1 + RUNNERS_UP], bound_s, steps)


def _candidate(space: Space, costs: Costs, found: Dealt) -> Candidate:
    stages = [
        StageChoice(setting.group.type_index, setting.degrees, setting.recompute, layers)
        for setting, layers in zip(found.settings, found.layers, strict=True)
        for _ in range(setting.stages)
    ]
    cost_s, _ = evaluate(costs, found.share, stages)
    return Candidate(space.plan(found.share, stages), cost_s)


@dataclass(eq=False)
class Setting:
    """What one group may do, and what a stage of it costs."""

    space: Space
    table: Costs
    share: BatchCut
    group: ChipGroup
    degrees: Degrees
    recompute: bool
    costs: dict[tuple[bool, bool], StageCost] = field(default_factory=dict)
    limits: dict[tuple[bool, bool, float], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stages = self.group.chips // self.degrees.chips
        self.layer_s = max(each for _, each in self.cost(False, False).time_s)

    def may_follow(self, before: Setting) -> bool:
        """Whether this group may come after another.

        Between two groups of one chip type, the earlier must have no smaller tensor-parallel
        degree, and must recompute if the later one does.
        """
        if before.group.type_index != self.group.type_index:
            return True
        return before.degrees.tp >= self.degrees.tp and before.recompute >= self.recompute

    def cost(self, first: bool, last: bool) -> StageCost:
        if (first, last) not in self.costs:
            chips = self.space.types[self.group.type_index]
            kinds = chips.stage_rank_kinds(self.group, self.degrees, self.degrees.chips)
            self.costs[first, last] = self.table.of(
                self.group.type_index,
                self.degrees,
                self.share,
                tuple(dict.fromkeys(itertools.chain(*kinds))),  # of its slowest stage
                recompute=self.recompute,
                first=first,
                last=last,
            )
        return self.costs[first, last]

    def most_layers(self, first: bool, last: bool, held: int) -> int:
        """Returns the most layers that fit on a stage with `held` micro-batches in flight."""
        key = (first, last, held)
        if key not in self.limits:
            capacity = self.space.types[self.group.type_index].chip.memory.capacity_bytes
            most, count = self.space.model.layers, self.share.micro_batches
            while most and self.cost(first, last).bytes(most, held, count) > capacity:
                most -= 1
            self.limits[key] = most
        return self.limits[key]

    def kinds(self, first: bool, last: bool) -> list[tuple[bool, bool, int]]:
        """Returns the kinds of its stages: whether first and last in the pipeline, and how many.

        first, last: whether the group is the pipeline's first and last.
        """
        if self.stages == 1:
            return [(first, last, 1)]
        ends = first + last
        kinds = [(True, False, 1)] * first + [(False, True, 1)] * last
        return kinds + ([(False, False, self.stages - ends)] if self.stages > ends else [])


class _Walk:
    """The depth-first search with one data-parallel degree."""

    def __init__(
        self, space: Space, costs: Costs, share: BatchCut, groups: list[ChipGroup]
    ) -> None:
        self.space, self.costs, self.share, self.groups = space, costs, share, groups
        self.alpha = bubble_coefficient(space.request.schedule)
        self.steps = 0
        self.options = [list(self._options(group)) for group in groups]

    def _options(self, group: ChipGroup) -> Iterator[Setting]:
        for tp in self.space.types[group.type_index].tp_degrees:
            degrees = Degrees(tp, self.share.replicas)
            if group.chips % degrees.chips == 0:
                for recompute in (False, True):
                    yield Setting(self.space, self.costs, self.share, group, degrees, recompute)

    def best(self) -> Dealt | None:
        best: Dealt | None = None
        for settings in self._settings((), 0):
            self.steps += 1
            layers = self._deal(settings)
            if layers is None:
                continue
            cost_s = self._formula_s(settings, layers)
            if best is None or cost_s < best.cost_s:
                best = Dealt(cost_s, self.share, settings, tuple(layers))
        return best

    def _settings(self, chosen: tuple[Setting, ...], stages: int) -> Iterator[tuple[Setting, ...]]:
        if len(chosen) == len(self.groups):
            yield chosen
            return
        for setting in self.options[len(chosen)]:
            rest = len(self.groups) - len(chosen) - 1
            if stages + setting.stages + rest > self.space.model.layers:
                continue
            if not chosen or setting.may_follow(chosen[-1]):
                yield from self._settings((*chosen, setting), stages + setting.stages)

    def _deal(self, settings: tuple[Setting, ...]) -> list[int] | None:
        """Returns the layers that each stage of each group has, or None where they do not fit.

        They are dealt out for equal times at first, and then refined until all are dealt.
        """
        most = self._limits(settings)
        if min(most) < 1:
            return None
        pace_s = self.space.model.layers / sum(s.stages / s.layer_s for s in settings)
        layers = [
            min(limit, max(1, math.ceil(pace_s / setting.layer_s)))
            for limit, setting in zip(most, settings, strict=True)
        ]
        return self._refine(layers, settings, most)

    def _limits(self, settings: tuple[Setting, ...]) -> list[int]:
        """Returns the most layers that fit on every stage of each group."""
        stages = sum(setting.stages for setting in settings)
        schedule, count = self.space.request.schedule, self.share.micro_batches
        after = stages
        limits = []
        for index, setting in enumerate(settings):
            first, last = index == 0, index == len(settings) - 1
            held = whole_in_flight(schedule, count, stages, after - 1)
            limit = setting.most_layers(first, last and setting.stages == 1, held)
            if last and setting.stages > 1:
                held = whole_in_flight(schedule, count, stages, 0)
                limit = min(limit, setting.most_layers(False, True, held))
            limits.append(limit)
            after -= setting.stages
        return limits

    def _refine(
        self, layers: list[int], settings: tuple[Setting, ...], most: list[int]
    ) -> list[int] | None:
        """Takes layers from the slowest stages, or gives to the fastest, until all are dealt."""
        held = sum(n * s.stages for n, s in zip(layers, settings, strict=True))
        missing = self.space.model.layers - held
        for _ in range(4 * self.space.model.layers):
            if missing == 0:
                return layers
            best, best_s = -1, 0.0
            for i, setting in enumerate(settings):
                if setting.stages > abs(missing):
                    continue
                if missing < 0 and layers[i] > 1 and layers[i] * setting.layer_s > best_s:
                    best, best_s = i, layers[i] * setting.layer_s
                longer_s = (layers[i] + 1) * setting.layer_s
                if missing > 0 and layers[i] < most[i] and (best < 0 or longer_s < best_s):
                    best, best_s = i, longer_s
            if best < 0:
                return None
            layers[best] += 1 if missing > 0 else -1
            missing -= settings[best].stages if missing > 0 else -settings[best].stages
        return None

    def _formula_s(self, settings: tuple[Setting, ...], layers: list[int]) -> float:
        """Returns a step's seconds by section 4.3.2, with the first and last stage's own costs."""
        most_s = sum_s = 0.0
        for index, setting in enumerate(settings):
            for first, last, stages in setting.kinds(index == 0, index == len(settings) - 1):
                time_s, update_s = setting.cost(first, last).seconds(layers[index])
                most_s = max(most_s, (self.share.micro_batches - self.alpha) * time_s + update_s)
                sum_s += stages * time_s
        return most_s + self.alpha * sum_s
