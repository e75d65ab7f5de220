"""Sharding annotations: how a tensor lies over unlike groups of ranks (Hetu v2, section 3).

A device group is an ordered list of ranks, and its distributed states say how the group holds a
tensor: split along a dimension, as duplicates, or partial, where the value is the sum of what the
ranks hold. HSPMD makes unions of both, one pair for each sharding subgroup, and says how subgroups
stand to each other: the heterogeneous dimension is one that is split over them (in shares that may
be unlike), DUPLICATE or PARTIAL; the heterogeneous size is how many there are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from heteropp.layout.boxes import Box, split

DUPLICATE, PARTIAL = -1, -2  # in the place of a dimension

Summand = tuple[int, ...]  # its name; of an annotation's: subgroup, and which of its summands


class AnnotationError(ValueError):
    """An annotation that cannot be, or not for this tensor; one sentence."""


@dataclass(frozen=True)
class DistributedStates:
    """The axes over which a group of ranks is laid out, outermost first: row-major in its ranks.

    Each axis is a dimension, DUPLICATE or PARTIAL, and a number of parts. Make one with `of`, which
    leaves out axes of one part and joins neighbours of one dimension, so that equal layouts compare
    equal.
    """

    axes: tuple[tuple[int, int], ...]

    @staticmethod
    def of(axes: Mapping[int, int] | Iterable[tuple[int, int]]) -> DistributedStates:
        joined: list[tuple[int, int]] = []
        for dimension, parts in axes.items() if isinstance(axes, Mapping) else axes:
            if dimension < PARTIAL or parts < 1:
                raise AnnotationError(
                    f"distributed states have {parts} parts along {dimension}; expected at least 1 "
                    "along a dimension, DUPLICATE (-1) or PARTIAL (-2)"
                )
            if joined and joined[-1][0] == dimension:
                joined[-1] = dimension, joined[-1][1] * parts
            elif parts > 1:
                joined.append((dimension, parts))
        return DistributedStates(tuple(joined))

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return math.prod(parts for _, parts in self.axes)

    @property
    def summands(self) -> int:
        """The number of summands whose sum is the value; 1: ranks hold the value itself."""
        return math.prod(parts for dimension, parts in self.axes if dimension == PARTIAL)

    @property
    def splits(self) -> bool:
        """Whether ranks of the group hold unlike boxes."""
        return any(dimension >= 0 for dimension, _ in self.axes)

    def place(self, whole: Box, index: int) -> tuple[Box, int]:
        """What the rank at `index` of the group holds: a box, and of which summand."""
        box, summand, inner = whole, 0, self.size
        for dimension, parts in self.axes:
            inner //= parts
            turn, index = divmod(index, inner)
            if dimension >= 0:
                box = split(box, dimension, parts, turn)
            elif dimension == PARTIAL:
                summand = summand * parts + turn
        return box, summand

    def __str__(self) -> str:
        return "{" + ", ".join(f"{_name(d)}: {parts}" for d, parts in self.axes) + "}"


@dataclass(frozen=True)
class Annotation:
    """How a tensor lies over sharding subgroups of ranks. Make one with `of`, which checks it."""

    groups: tuple[tuple[int, ...], ...]  # the device-group union
    states: tuple[DistributedStates, ...]  # the distributed-states union
    hdim: int  # over subgroups: a dimension, DUPLICATE or PARTIAL
    shares: tuple[int, ...]  # of dimension hdim, by subgroup; empty where it is no dimension

    @staticmethod
    def of(
        subgroups: Iterable[tuple[Sequence[int], Mapping[int, int] | Iterable[tuple[int, int]]]],
        hdim: int = DUPLICATE,
        shares: Sequence[int] | None = None,
    ) -> Annotation:
        """Makes an annotation from the ranks and distributed states of each subgroup.

        shares: each subgroup's part of dimension hdim, as sizes or as fractions of their sum; None:
        equal parts. Raises AnnotationError.
        """
        pairs = [(tuple(ranks), DistributedStates.of(axes)) for ranks, axes in subgroups]
        groups, states = tuple(g for g, _ in pairs), tuple(s for _, s in pairs)
        if not pairs:
            raise AnnotationError("the annotation has no subgroup; expected at least one")
        for i, (ranks, laid_out) in enumerate(pairs):
            if len(ranks) != laid_out.size:
                raise AnnotationError(
                    f"subgroup {i} has {len(ranks)} ranks and distributed states {laid_out} of "
                    f"{laid_out.size}; expected as many"
                )
        every = [rank for ranks in groups for rank in ranks]
        twice = [rank for rank, times in Counter(every).items() if times > 1]
        if twice or min(every) < 0:
            raise AnnotationError(
                f"rank {twice[0]} is in the annotation twice; expected every rank once"
                if twice
                else f"rank {min(every)} is in the annotation; expected ranks from 0"
            )
        if hdim < PARTIAL:
            raise AnnotationError(
                f"hdim is {hdim}; expected a dimension, DUPLICATE (-1) or PARTIAL (-2)"
            )
        if len(pairs) == 1:
            hdim = DUPLICATE
        if hdim < 0:
            return Annotation(groups, states, hdim, ())
        shares = tuple(shares or (1,) * len(pairs))
        if len(shares) != len(pairs) or min(shares) < 1:
            raise AnnotationError(
                f"shares is {list(shares)}; expected one of at least 1 for each of "
                f"{len(pairs)} subgroups"
            )
        common = math.gcd(*shares)
        return Annotation(groups, states, hdim, tuple(share // common for share in shares))

    @property
    def hsize(self) -> int:
        return len(self.groups)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for ranks in self.groups for rank in ranks)

    @property
    def partial(self) -> bool:
        return self.hdim == PARTIAL or any(states.summands > 1 for states in self.states)

    def __str__(self) -> str:
        subgroups = ", ".join(
            f"{list(ranks)} {states}"
            for ranks, states in zip(self.groups, self.states, strict=True)
        )
        if self.hsize == 1:
            return subgroups
        over = _name(self.hdim) if self.hdim < 0 else f"{self.hdim} in shares {list(self.shares)}"
        return f"{subgroups} with hdim {over}"


@dataclass(frozen=True)
class Holding:
    """What one rank holds of a tensor."""

    rank: int
    subgroup: int
    box: Box
    summand: Summand | None  # None: the value itself


def subgroup_box(annotation: Annotation, shape: Sequence[int], subgroup: int) -> Box:
    """What a subgroup holds together. Raises AnnotationError."""
    whole, hdim, shares = Box.whole(shape), annotation.hdim, annotation.shares
    if hdim < 0:
        return whole
    _check_dimension(annotation, hdim, shape)
    unit, rest = divmod(shape[hdim], sum(shares))
    if rest:
        raise AnnotationError(
            f"shares {list(shares)} do not divide dimension {hdim} of a tensor {list(shape)}; "
            f"expected a multiple of {sum(shares)}"
        )
    first = unit * sum(shares[:subgroup])
    ranges = list(whole.ranges)
    ranges[hdim] = first, first + unit * shares[subgroup]
    return Box(tuple(ranges))


def holdings(annotation: Annotation, shape: Sequence[int]) -> list[Holding]:
    """What every rank of an annotation holds of a tensor. Raises AnnotationError."""
    result = []
    for i, (ranks, states) in enumerate(zip(annotation.groups, annotation.states, strict=True)):
        outer = subgroup_box(annotation, shape, i)
        for dimension, _ in states.axes:
            _check_dimension(annotation, dimension, shape)
        summed = annotation.hdim == PARTIAL or states.summands > 1
        for index, rank in enumerate(ranks):
            try:
                box, summand = states.place(outer, index)
            except ValueError as error:
                raise AnnotationError(
                    f"{annotation} does not fit a tensor {list(shape)}: {error}"
                ) from None
            result.append(Holding(rank, i, box, (i, summand) if summed else None))
    return result


def _check_dimension(annotation: Annotation, dimension: int, shape: Sequence[int]) -> None:
    if dimension >= len(shape):
        raise AnnotationError(
            f"{annotation} splits dimension {dimension}; a tensor {list(shape)} has {len(shape)}"
        )


def _name(dimension: int) -> str:
    return {DUPLICATE: "duplicate", PARTIAL: "partial"}.get(dimension, str(dimension))
