"""How a parameter of a model lies over ranks: its declaration, and the annotations it stands for.

Whoever asks where a parameter's pieces lie is answered from here, out of distributed states: flat
buffers, and with them checkpoints, switches and the sums of copies; what fills a module; and plain
modules that are annotated (hspmd/declaration.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, product

from heteropp.layout.boxes import Box
from heteropp.layout.hspmd.annotation import DUPLICATE, PARTIAL, Annotation, DistributedStates


@dataclass(frozen=True)
class Parameter:
    """A parameter of the whole model, and how tensor parallelism cuts it."""

    name: str  # its name; in a model's parts, without the part's own name
    shape: tuple[int, ...]  # its whole shape, before it is cut
    split_dimension: int | None  # dimension that tensor parallelism cuts; null: ranks hold copies
    # pieces stand one after another, as queries, keys and values in one matrix
    packed: tuple[int, ...] = ()  # sizes of pieces that are cut each by itself; empty: one piece
    partial: bool = False  # whether each rank that holds a copy has a summand of its gradient
    decays: bool = True  # whether weight decay applies to it
    trains: bool = True  # whether it trains; otherwise it is frozen, and no step changes it

    def problem(self) -> str | None:
        """Says in a clause what of this parameter cannot be; None: all can."""
        cut, dimensions = self.split_dimension, len(self.shape)
        if any(size < 0 for size in self.shape):
            return f"shape {list(self.shape)}; expected no negative sizes"
        if cut is not None and not 0 <= cut < dimensions:
            return f"split_dimension {cut}; expected one of the {dimensions} of its shape"
        size = None if cut is None else self.shape[cut]
        if self.packed and (min(self.packed) < 1 or sum(self.packed) != size):
            return f"packed {list(self.packed)}; expected sizes that make up what is cut, {size}"
        return None

    @property
    def is_hidden_matrix(self) -> bool:
        """Whether it is a matrix of a block, which embeddings, heads, norms and biases are not."""
        return len(self.shape) == 2 and self.name.startswith("layers.")

    def states(self, tp: int) -> DistributedStates:
        """Returns how a tensor-parallel group holds the value, or each piece of a packed one."""
        return _states(self.split_dimension, tp)

    def gradient_states(self, tp: int, rows_are_cut: bool = False) -> DistributedStates:
        """Returns how a tensor-parallel group holds the gradient before anything is summed.

        rows_are_cut: over the group, by sequence parallelism.
        """
        if self.split_dimension is None and (self.partial or rows_are_cut):
            return _states(PARTIAL, tp)
        return self.states(tp)

    def annotation(self, groups: Sequence[Sequence[int]]) -> Annotation:
        """Returns how the value, or each piece of a packed one, lies over tensor-parallel groups.

        They may be of unlike sizes; each holds it whole.
        """
        return Annotation.of((ranks, self.states(len(ranks)).axes) for ranks in groups)

    def gradient_annotation(
        self, groups: Sequence[Sequence[int]], rows_are_cut: bool = False
    ) -> Annotation:
        """Returns how the gradient lies before anything is summed: each group has a summand, of
        its share of the batch.
        """
        return Annotation.of(
            ((ranks, self.gradient_states(len(ranks), rows_are_cut).axes) for ranks in groups),
            PARTIAL,
        )

    def boxes(self, tp: int, index: int, rows: tuple[int, int] | None = None) -> tuple[Box, ...]:
        """Returns what one rank of a tensor-parallel group holds, one box after another.

        rows: of the first dimension those that the whole group holds, such as some experts of a
        stack; None: all of them.

        Each box's elements stand together in memory: there is one for each piece, and where pieces
        stand within rows, as in a stack of experts' matrices, one for each row and piece. Raises
        ValueError where the degree does not divide what is cut.
        """
        try:
            boxes = _boxes(self.shape, self.split_dimension, self.packed, tp, index)
        except ValueError as error:
            raise ValueError(f"parameter {self.name}: {error}") from None
        if rows is None:
            return boxes
        held = Box((rows, *Box.whole(self.shape[1:]).ranges))
        return tuple([common for box in boxes if (common := box.intersect(held))])

    def held_shape(self, tp: int) -> tuple[int, ...]:
        """Returns the shape of what one rank of a tensor-parallel group holds."""
        cut = self.split_dimension
        return tuple(size // tp if i == cut else size for i, size in enumerate(self.shape))


@lru_cache(maxsize=4096)  # a model's blocks are alike
def _boxes(
    shape: tuple[int, ...], split: int | None, packed: tuple[int, ...], tp: int, index: int
) -> tuple[Box, ...]:
    pieces = [Box.whole(shape)]
    if packed and split is not None and tp > 1:
        ends = (0, *accumulate(packed))
        pieces = [
            Box((*((i, i + 1) for i in row), span, *Box.whole(shape[split + 1 :]).ranges))
            for row in product(*map(range, shape[:split]))
            for span in pairwise(ends)
        ]
    return tuple([_states(split, tp).place(piece, index)[0] for piece in pieces])


@lru_cache(maxsize=4096)
def _states(dimension: int | None, tp: int) -> DistributedStates:
    return DistributedStates.of({DUPLICATE if dimension is None else dimension: tp})
