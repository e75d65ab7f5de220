"""Where the parameters of a ministage stand in a rank's flat buffers, and what a shard holds.

What a rank holds of a parameter is said by the parameter's distributed states. What a shard holds
is worked out here: ZeRO splits the buffer (optimizer/zero.py has the buffer's annotation), and so
cuts parameters within their rows, where no split along a dimension does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from heteropp.layout.boxes import Box, Ranges
from heteropp.layout.parameter import Parameter

if TYPE_CHECKING:
    from heteropp.models.spec import ModelSpec

ALIGNMENT = 32  # elements; kernels may take another path, with other last bits, when unaligned

# What a buffer has of the experts: all of them beside all else, none, or [first, last) of every
# layer and nothing else. Expert parallelism gives a rank one buffer of either of the last two.
Experts = Literal["all", "none"] | tuple[int, int]


@dataclass(frozen=True)
class Entry:
    """A parameter's place in the flat buffer."""

    parameter: Parameter  # under its name in the module
    global_name: str
    boxes: tuple[Box, ...]  # of the whole parameter, one after another; several of a packed one
    sharded: bool  # over the tensor-parallel group; otherwise its ranks hold copies
    first: int
    last: int

    @property
    def name(self) -> str:
        return self.parameter.name

    @property
    def box(self) -> Box:
        """The only box of a parameter that is not packed."""
        (box,) = self.boxes
        return box


@dataclass(frozen=True)
class BufferPiece:
    """A box of a parameter whose elements stand together in the flat buffer, in row-major order."""

    name: str  # global
    box: Box
    first: int
    last: int


@dataclass(frozen=True)
class Layout:
    """The buffer of values: what trains, and behind it what is frozen.

    Gradients and the optimizer's state have buffers of what trains alone.
    """

    entries: tuple[Entry, ...]  # of what trains
    frozen: tuple[Entry, ...]
    size: int  # of what trains, in elements
    whole_size: int
    shards: int  # of what trains, of equal size, aligned
    matrices: int  # elements at the buffer's begin that are of hidden matrices

    def shard(self, index: int) -> slice:
        return slice(index * self.size // self.shards, (index + 1) * self.size // self.shards)

    def frozen_shard(self, index: int) -> slice:
        """Returns the share of what is frozen for which a rank that keeps a shard answers.

        All replicas hold all of it.
        """
        first, last = (
            self.size + (self.whole_size - self.size) * i // self.shards // ALIGNMENT * ALIGNMENT
            for i in (index, index + 1)
        )
        return slice(first, last)

    def matrices_in(self, shard: slice) -> int:
        """Returns how many of a shard's elements, which are its first, are of hidden matrices."""
        return max(0, min(self.matrices, shard.stop) - shard.start)

    def boxes(self) -> list[BufferPiece]:
        """Returns what the buffer holds, a piece for each box."""
        return _pieces((*self.entries, *self.frozen))

    def pieces(self, index: int) -> list[BufferPiece]:
        """What a shard holds, in order."""
        return self._within(self.shard(index), self.entries)

    def frozen_pieces(self, index: int) -> list[BufferPiece]:
        return self._within(self.frozen_shard(index), self.frozen)

    def _within(self, shard: slice, entries: tuple[Entry, ...]) -> list[BufferPiece]:
        result = []
        for whole in _pieces(entries):
            first, last = max(whole.first, shard.start), min(whole.last, shard.stop)
            if first < last:
                result += _cut(whole, first - whole.first, last - whole.first)
        return result


@lru_cache(maxsize=4096)  # all who plan, move or sum ask for the same few
def layout(
    model: ModelSpec,
    layers: tuple[int, int],
    tp: int,
    tp_index: int,
    shards: int,
    experts: Experts = "all",
) -> Layout:
    """How one rank of a tensor-parallel group holds layers [first, last).

    Parameters that an optimizer mostly treats alike stand together: hidden matrices first, with
    weight decay or without, and of the others those without it last.
    """
    parameters, rows = model.parameters(layers), None
    if experts != "all":
        rows = None if experts == "none" else experts
        wanted = rows is not None
        parameters = [p for p in parameters if model.is_of_experts(p) == wanted]

    def placed(some: Iterable[Parameter], offset: int) -> tuple[tuple[Entry, ...], int]:
        """Returns the entries of some parameters, one behind the other, and where the next is."""
        entries = []
        for parameter in some:
            boxes = parameter.boxes(tp, tp_index, rows)
            last = offset + sum(box.size for box in boxes)
            sharded = parameter.states(tp).splits
            name = model.global_name(parameter.name)
            entries.append(Entry(parameter, name, boxes, sharded, offset, last))
            offset = -(-last // ALIGNMENT) * ALIGNMENT
        return tuple(entries), offset

    training = sorted((p for p in parameters if p.trains), key=_kind)
    entries, end = placed(training, 0)
    behind = [entry.first for entry in entries if not entry.parameter.is_hidden_matrix]
    matrices = min(behind, default=end)
    # also of a stage without any, so that no buffer or message is empty
    size = max(1, -(-end // (shards * ALIGNMENT))) * shards * ALIGNMENT
    frozen, whole_size = placed((p for p in parameters if not p.trains), size)
    return Layout(entries, frozen, size, whole_size, shards, matrices)


def _pieces(entries: Iterable[Entry]) -> list[BufferPiece]:
    return [
        BufferPiece(entry.global_name, box, first, first + math.prod(box.shape))
        for entry in entries
        for box, first in _starts(entry)
    ]


def _kind(parameter: Parameter) -> int:
    if parameter.is_hidden_matrix:
        return 0
    return 1 if parameter.decays and len(parameter.shape) > 1 else 2


def _starts(entry: Entry) -> Iterator[tuple[Box, int]]:
    first = entry.first
    for box in entry.boxes:
        yield box, first
        first += math.prod(box.shape)


def _cut(whole: BufferPiece, first: int, last: int) -> list[BufferPiece]:
    """Returns elements [first, last) of a box: rows as one box, and what is cut off rows."""
    result, start = [], whole.first + first
    for ranges in _boxes(whole.box.ranges, first, last):
        box = Box(ranges)
        end = start + math.prod(box.shape)
        result.append(BufferPiece(whole.name, box, start, end))
        start = end
    return result


def _boxes(ranges: Ranges, first: int, last: int) -> Iterator[Ranges]:
    """Yields the boxes that make up elements [first, last) of a box, in row-major order."""
    if not ranges:
        yield ()
        return
    (begin, _), *inner = ranges
    width = math.prod(stop - start for start, stop in inner)
    while first < last:
        row, column = divmod(first, width)
        if column == 0 and last - first >= width:  # whole rows
            rows = (last - first) // width
            yield ((begin + row, begin + row + rows), *inner)
            first += rows * width
        else:
            end = min(width, column + last - first)
            for part in _boxes(tuple(inner), column, end):
                yield ((begin + row, begin + row + 1), *part)
            first += end - column
