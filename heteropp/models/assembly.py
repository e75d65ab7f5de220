"""How a tensor is made of slices of others, as a checkpoint's files often hold parameters.

An assembly stands for a tensor that nobody has read. torch's own functions put assemblies together
and cut them, so that code written for tensors (a family's own conversion of its checkpoints) says
which slices a tensor is made of; then a box of it is read, and no more than that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from heteropp.layout.boxes import Box

Fetch = Callable[[str, Box], Tensor]  # reads a box of a source


@dataclass(frozen=True)
class Piece:
    """A box of an assembly, which is a slice of a source."""

    box: Box
    source: str
    first: tuple[int, ...]  # where the slice begins in the source, in every dimension of it
    # for every dimension of the box, that of the source; None: the source has none, the size is 1.
    # Dimensions of the source that are not here are cut at one index
    axes: tuple[int | None, ...]

    def read(self, box: Box, fetch: Fetch) -> Tensor:
        """Returns a box within this piece's."""
        ranges = [(first, first + 1) for first in self.first]
        for axis, (first, last), (start, _) in zip(
            self.axes, box.ranges, self.box.ranges, strict=True
        ):
            if axis is not None:
                begin = self.first[axis] + first - start
                ranges[axis] = (begin, begin + last - first)
        value = fetch(self.source, Box(tuple(ranges)))
        kept = [axis for axis in self.axes if axis is not None]
        cut = [axis for axis in range(len(ranges)) if axis not in kept]
        return value.permute((*kept, *cut)).reshape(box.shape)


@dataclass(frozen=True)
class Assembly:
    """A tensor of which every element is in one of its pieces."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, source: str, shape: Sequence[int]) -> Assembly:
        """Returns the whole of a source."""
        dimensions = tuple(range(len(shape)))
        return cls(tuple(shape), (Piece(Box.whole(shape), source, (0,) * len(shape), dimensions),))

    @property
    def sources(self) -> list[str]:
        return list(dict.fromkeys(piece.source for piece in self.pieces))

    def read(self, box: Box, fetch: Fetch) -> Tensor:
        """Returns a box; it may share memory with what was fetched."""
        found: Tensor | None = None
        for piece in self.pieces:
            if (common := piece.box.intersect(box)) is None:
                continue
            part = piece.read(common, fetch)
            if common == box:
                return part
            if found is None:
                found = part.new_empty(box.shape)
            elif part.dtype != found.dtype:  # of a folder with tensors of several
                found = found.to(torch.promote_types(part.dtype, found.dtype))
            found[common.within(box)] = part
        assert found is not None, "an assembly's pieces cover it"
        return found

    # ---------------------------------------------------------------- as of a tensor

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def contiguous(self) -> Assembly:
        return self

    def squeeze(self, dim: int) -> Assembly:
        dim %= self.ndim
        if self.shape[dim] != 1:
            return self
        return self._map(lambda ranges, axes: (_without(ranges, dim), _without(axes, dim)))

    def unsqueeze(self, dim: int) -> Assembly:
        dim %= self.ndim + 1
        return self._map(
            lambda ranges, axes: (
                (*ranges[:dim], (0, 1), *ranges[dim:]),
                (*axes[:dim], None, *axes[dim:]),
            )
        )

    def transpose(self, dim0: int, dim1: int) -> Assembly:
        order = list(range(self.ndim))
        order[dim0], order[dim1] = order[dim1], order[dim0]
        return self._map(
            lambda ranges, axes: (tuple(ranges[d] for d in order), tuple(axes[d] for d in order))
        )

    def narrow(self, dim: int, first: int, last: int) -> Assembly:
        """Returns [first, last) of a dimension."""
        whole = list(Box.whole(self.shape).ranges)
        whole[dim] = (first, last)
        wanted = Box(tuple(whole))
        pieces = []
        for piece in self.pieces:
            if (common := piece.box.intersect(wanted)) is None:
                continue
            begin = list(piece.first)
            if (axis := piece.axes[dim]) is not None:
                begin[axis] += common.ranges[dim][0] - piece.box.ranges[dim][0]
            box = _moved(common, dim, -first)
            pieces.append(Piece(box, piece.source, tuple(begin), piece.axes))
        return Assembly(wanted.shape, tuple(pieces))

    def split(self, sizes: Sequence[int] | int, dim: int = 0) -> tuple[Assembly, ...]:
        dim %= self.ndim
        whole = self.shape[dim]
        if isinstance(sizes, int):
            sizes = [min(sizes, whole - first) for first in range(0, whole, sizes)]
        if sum(sizes) != whole:
            raise ValueError(f"sizes {list(sizes)} do not add up to {whole}")
        ends = accumulate(sizes, initial=0)
        return tuple(self.narrow(dim, first, last) for first, last in pairwise(ends))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[Assembly, ...]:
        return self.split(-(-self.shape[dim] // chunks), dim)

    @classmethod
    def cat(cls, tensors: Sequence[Assembly], dim: int = 0) -> Assembly:
        dim %= tensors[0].ndim
        shapes = {_without(each.shape, dim) for each in tensors}
        if len(shapes) > 1:
            raise ValueError(f"{sorted(shapes)} differ")
        pieces: list[Piece] = []
        last = 0
        for each in tensors:
            pieces += [
                Piece(_moved(piece.box, dim, last), piece.source, piece.first, piece.axes)
                for piece in each.pieces
            ]
            last += each.shape[dim]
        shape = list(tensors[0].shape)
        shape[dim] = last
        return cls(tuple(shape), tuple(pieces))

    @classmethod
    def stack(cls, tensors: Sequence[Assembly], dim: int = 0) -> Assembly:
        return cls.cat([each.unsqueeze(dim) for each in tensors], dim)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: tuple = (), named: dict | None = None
    ) -> Any:
        known: dict[Any, Callable[..., Any]] = {
            torch.cat: cls.cat,
            torch.stack: cls.stack,
            torch.chunk: cls.chunk,
            torch.split: cls.split,
            torch.transpose: cls.transpose,
            torch.squeeze: cls.squeeze,
            torch.unsqueeze: cls.unsqueeze,
        }
        if function not in known:
            raise TypeError(f"torch.{function.__name__} has no form for slices of files")
        return known[function](*arguments, **(named or {}))

    def _map(self, change: Callable[[tuple, tuple], tuple[tuple, tuple]]) -> Assembly:
        """Returns it with other dimensions. change: of ranges, and of a piece's axes."""
        pieces = []
        for piece in self.pieces:
            ranges, axes = change(piece.box.ranges, piece.axes)
            pieces.append(Piece(Box(ranges), piece.source, piece.first, axes))
        ranges, _ = change(Box.whole(self.shape).ranges, (None,) * self.ndim)
        return Assembly(Box(ranges).shape, tuple(pieces))


def _without(values: tuple, dim: int) -> tuple:
    return (*values[:dim], *values[dim + 1 :])


def _moved(box: Box, dim: int, by: int) -> Box:
    ranges = list(box.ranges)
    ranges[dim] = (ranges[dim][0] + by, ranges[dim][1] + by)
    return Box(tuple(ranges))
