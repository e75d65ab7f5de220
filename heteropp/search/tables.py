"""A part of the search space as problems of the native search (csrc/planner)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from heteropp import _planner
from heteropp.schedule.in_flight import whole_in_flight
from heteropp.schedule.stage_actions import bubble_coefficient
from heteropp.search.costs import ROUNDING_BYTES, Costs
from heteropp.search.planner import Request, SearchError
from heteropp.search.space import (
    BatchCut,
    ChipGroup,
    Degrees,
    RankKind,
    Space,
    StageChoice,
    Widths,
)

SCHEDULES = ("1f1b", "gpipe", "zb-h1")  # those of one ministage a stage

Allowed = tuple[frozenset[Widths], ...]  # by group


class Tables:
    """One way to cut the batch and to group the chips."""

    def __init__(
        self, space: Space, costs: Costs, share: BatchCut, groups: list[ChipGroup]
    ) -> None:
        self.space, self.costs, self.share, self.groups = space, costs, share, groups
        self.request = space.request
        self.more_bytes = 0.0  # that every chip is thought to have
        self._made: dict[tuple, _planner.Cost] = {}
        self.keys = [self._keys(group) for group in groups]
        self.choices = [
            [self._choice(index, *key) for key in keys] for index, keys in enumerate(self.keys)
        ]

    @property
    def everything(self) -> Allowed:
        return tuple(frozenset(degrees.widths for degrees, _ in keys) for keys in self.keys)

    def problems(self, allowed: Allowed) -> Iterator[_planner.Problem]:
        """Yields the native planner's problems.

        With zb-h1, memory depends on the number of stages, so that each number is a problem.
        """
        types = [self._chip_type(index, widths) for index, widths in enumerate(allowed)]
        schedule, count = self.request.schedule, self.share.micro_batches
        layers = self.space.model.layers
        most = min(layers, sum(group.chips for group in self.groups))
        for stages in range(len(types), most + 1) if schedule == "zb-h1" else [0]:
            yield _planner.Problem(
                layers=layers,
                micro_batches=count,
                alpha=bubble_coefficient(schedule),
                in_flight=[
                    whole_in_flight(schedule, count, stages, after) for after in range(most)
                ],
                stages=stages,
                types=types,
            )

    def stages(self, solution: _planner.Solution) -> tuple[StageChoice, ...]:
        return tuple(
            StageChoice(self.groups[index].type_index, *self.keys[index][choice], layers)
            for index, choice, layers in solution.stages
        )

    def degrees(self, solution: _planner.Solution) -> tuple[Widths, ...]:
        """Returns the degrees of each group's first stage, but for its replicas."""
        widths: dict[int, Widths] = {}
        for index, choice, _ in solution.stages:
            widths.setdefault(index, self.keys[index][choice][0].widths)
        return tuple(widths[index] for index in range(len(self.groups)))

    def _keys(self, group: ChipGroup) -> list[tuple[Degrees, bool]]:
        return [
            (degrees, recompute)
            for degrees in self.space.degrees(group, self.share)
            for recompute in (False, True)
        ]

    def _choice(self, index: int, degrees: Degrees, recompute: bool) -> _planner.Choice:
        """Returns a choice; spaces that share their costs share it, too."""
        group = self.groups[index]
        chips = self.space.types[group.type_index]
        key = (
            *(
                chips.name,
                chips.ranks.start,
                chips.runs,
                group.start,
                group.chips,
                degrees,
                recompute,
            ),
            *(self.share, self.request.stage_degrees, self.space.sequence_parallel),
            *(index == 0, index == len(self.groups) - 1),
        )
        if key not in self.costs.made:
            self.costs.made[key] = self._make_choice(index, degrees, recompute)
        choice: _planner.Choice = self.costs.made[key]
        return choice

    def _make_choice(self, index: int, degrees: Degrees, recompute: bool) -> _planner.Choice:
        group = self.groups[index]
        align = degrees.tp if self.request.stage_degrees else degrees.chips
        chips = self.space.types[group.type_index]
        kinds = chips.stage_rank_kinds(group, degrees, align)
        unlike = list(dict.fromkeys(kinds))
        ends = [self._ends(index, *ends) for ends in itertools.product((False, True), repeat=2)]
        costs = []
        for own in unlike:
            made = {end: self._cost(index, degrees, recompute, own, end) for end in set(ends)}
            costs.append([made[end] for end in ends])
        places = [unlike.index(own) for own in kinds]
        return _planner.Choice(chips=degrees.chips, align=align, costs=costs, places=places)

    def _cost(
        self,
        index: int,
        degrees: Degrees,
        recompute: bool,
        kinds: tuple[RankKind, ...],
        ends: tuple[bool, bool],
    ) -> _planner.Cost:
        """Returns the cost of a stage; ends: whether it is the pipeline's first, and its last."""
        type_index = self.groups[index].type_index
        key = (type_index, degrees, recompute, kinds, ends)
        if key not in self._made:
            cost = self.costs.of(
                *(type_index, degrees, self.share, kinds),
                recompute=recompute,
                first=ends[0],
                last=ends[1],
            )
            self._made[key] = _planner.Cost(**cost._asdict())
        return self._made[key]

    def _ends(self, index: int, first: bool, last: bool) -> tuple[bool, bool]:
        """Returns which ends of the pipeline a stage is, as far as its group can hold them."""
        return first and index == 0, last and index == len(self.groups) - 1

    def _chip_type(self, index: int, widths: frozenset[Widths]) -> _planner.ChipType:
        group = self.groups[index]
        capacity = self.space.types[group.type_index].chip.memory.capacity_bytes
        return _planner.ChipType(
            chips=group.chips,
            capacity_bytes=capacity - ROUNDING_BYTES + self.more_bytes,
            choices=self.choices[index],
            lanes=self._lanes(index, widths),
        )

    def _lanes(self, index: int, allowed: frozenset[Widths]) -> list[_planner.Lane]:
        """Returns the sets of choices that the stages of a group may mix."""
        together: dict[object, list[int]] = {}
        for choice, (degrees, recompute) in enumerate(self.keys[index]):
            if degrees.widths in allowed:
                lane = (
                    None if self.request.stage_degrees else degrees,
                    None if self.request.uneven_layers else recompute,
                )
                together.setdefault(lane, []).append(choice)
        alike = not self.request.uneven_layers
        return [_planner.Lane(choices=choices, alike=alike) for choices in together.values()]


def check_schedule(planner: str, request: Request) -> None:
    """Raises SearchError for a schedule that planners of one ministage a stage do not know."""
    if request.schedule not in SCHEDULES:
        raise SearchError(
            f"planner {planner} plans {', '.join(SCHEDULES)}; the schedule is {request.schedule}"
        )
