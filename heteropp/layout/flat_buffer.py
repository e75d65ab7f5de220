"""Where the parameters of a ministage stand in a rank's flat buffers, and what a shard holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from heteropp.description.boxes import Box
from heteropp.description.model import Model
from heteropp.models.llama.parameters import global_name, model_parameters

ALIGNMENT = 32  # elements; kernels may take another path, with other last bits, when unaligned


@dataclass(frozen=True)
class Entry:
    """A parameter's place in the flat buffer."""

    name: str  # in the module
    global_name: str
    box: Box  # of the whole parameter
    sharded: bool  # over the tensor-parallel group; otherwise its ranks hold copies
    first: int
    last: int


@dataclass(frozen=True)
class BufferPiece:
    """A box of a parameter whose elements stand together in the flat buffer, in row-major order."""

    name: str  # global
    box: Box
    first: int
    last: int


@dataclass(frozen=True)
class Layout:
    entries: tuple[Entry, ...]
    size: int  # of the buffer, in elements
    shards: int  # of equal size, aligned

    def shard(self, index: int) -> slice:
        return slice(index * self.size // self.shards, (index + 1) * self.size // self.shards)

    def pieces(self, index: int) -> list[BufferPiece]:
        """What a shard holds, in order."""
        shard = self.shard(index)
        result = []
        for entry in self.entries:
            first, last = max(entry.first, shard.start), min(entry.last, shard.stop)
            if first < last:
                result += _pieces(entry, first - entry.first, last - entry.first)
        return result


@lru_cache(maxsize=4096)  # all who plan, move or sum ask for the same few
def layout(model: Model, layers: tuple[int, int], tp: int, tp_index: int, shards: int) -> Layout:
    """How one rank of a tensor-parallel group holds layers [first, last)."""
    entries, offset = [], 0
    for parameter in model_parameters(model, layers):
        box = parameter.box(tp, tp_index)
        last = offset + math.prod(box.shape)
        sharded = parameter.split_dimension is not None and tp > 1
        name = global_name(model, parameter.name)
        entries.append(Entry(parameter.name, name, box, sharded, offset, last))
        offset = -(-last // ALIGNMENT) * ALIGNMENT
    size = -(-offset // (shards * ALIGNMENT)) * shards * ALIGNMENT
    return Layout(tuple(entries), size, shards)


def _pieces(entry: Entry, first: int, last: int) -> list[BufferPiece]:
    """Elements [first, last) of a parameter: rows as one box, and what is cut off rows."""
    (begin, _), *inner = entry.box.ranges
    if not inner:
        box = Box(((begin + first, begin + last),))
        return [BufferPiece(entry.global_name, box, entry.first + first, entry.first + last)]
    ((left, right),) = inner
    width = right - left
    result = []
    while first < last:
        row, column = divmod(first, width)
        if column or last - first < width:
            rows, columns = 1, (column, min(width, column + last - first))
        else:
            rows, columns = (last - first) // width, (0, width)
        size = rows * (columns[1] - columns[0])
        box = Box(((begin + row, begin + row + rows), (left + columns[0], left + columns[1])))
        result.append(
            BufferPiece(entry.global_name, box, entry.first + first, entry.first + first + size)
        )
        first += size
    return result
