"""Boxes: who holds which slice of which tensor, and what two holders have in common."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Ranges = tuple[tuple[int, int], ...]  # [first, last) in every dimension


@dataclass(frozen=True, order=True)
class Box:
    """A slice of a tensor: one half-open range per dimension, in global coordinates."""

    ranges: Ranges

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Returns all of a tensor."""
        return cls(tuple((0, size) for size in shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(last - first for first, last in self.ranges)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(last - first for first, last in self.ranges)

    def intersect(self, other: Box) -> Box | None:
        """The common part, or None when there is none."""
        ranges = tuple(
            (max(a, c), min(b, d)) for (a, b), (c, d) in zip(self.ranges, other.ranges, strict=True)
        )
        return Box(ranges) if all(first < last for first, last in ranges) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """This box as slices of a tensor that holds `outer`."""
        return tuple(
            slice(first - start, last - start)
            for (first, last), (start, _) in zip(self.ranges, outer.ranges, strict=True)
        )

    def without(self, other: Box) -> list[Box]:
        """The rest that `other` leaves of this box, as boxes that do not overlap."""
        if (common := self.intersect(other)) is None:
            return [self]
        rest, ranges = [], list(self.ranges)
        for d, ((first, last), (begin, end)) in enumerate(
            zip(self.ranges, common.ranges, strict=True)
        ):
            for beside in ((first, begin), (end, last)):
                if beside[0] < beside[1]:
                    rest.append(Box((*ranges[:d], beside, *ranges[d + 1 :])))
            ranges[d] = (begin, end)
        return rest


def uncovered(boxes: Iterable[Box], covers: Iterable[Box]) -> list[Box]:
    """What `covers` leave of some boxes; it does not overlap where those do not."""
    rest = list(boxes)
    for cover in covers:
        rest = [piece for box in rest for piece in box.without(cover)]
    return rest


def split(box: Box, dimension: int, parts: int, index: int) -> Box:
    """Part `index` of `parts` equal parts along a dimension, which they must divide."""
    first, last = box.ranges[dimension]
    size, rest = divmod(last - first, parts)
    if rest:
        raise ValueError(
            f"{parts} parts do not divide dimension {dimension} of size {last - first}"
        )
    ranges = list(box.ranges)
    ranges[dimension] = (first + index * size, first + (index + 1) * size)
    return Box(tuple(ranges))
