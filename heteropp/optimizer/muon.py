"""Muon: hidden matrices move along their momentum, made orthogonal (Jordan et al., 2024).

A matrix is what torch.optim.Muon would see: a whole parameter, also where it packs queries, keys
and values. A rank holds a part of most: of ZeRO's shards and of tensor parallelism's pieces the
momentum is gathered, in the 16 bits in which it is made orthogonal, and each rank keeps its part of
the result. Learning rate and weight decay are AdamW's, as the update's size is made to be that of
AdamW's (Liu et al., "Muon is Scalable for LLM Training", section 2.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from heteropp.description.hyperparameters import Hyperparameters
from heteropp.layout.boxes import Box
from heteropp.layout.flat_buffer import Entry, Layout
from heteropp.models.parallel.tensor_parallel import TensorParallelGroup

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of the Newton-Schulz iteration
ITERATIONS = 5
EPSILON = 1e-7
RMS = 0.2  # of AdamW's update

Gather = Callable[[Tensor], Tensor]  # a shard of a flat buffer, to the whole buffer


@dataclass(frozen=True)
class Matrix:
    """A hidden matrix of which a shard holds elements [first, last) of the flat buffer."""

    entry: Entry
    first: int
    last: int
    learning_rate_factor: float
    weight_decay: float

    @property
    def scale(self) -> float:
        """What makes the update of an orthogonal matrix of this shape as large as AdamW's."""
        return RMS * math.sqrt(max(self.entry.parameter.shape))


class Muon:
    """torch.optim.Muon's arithmetic on the matrices of one shard, in place."""

    def __init__(
        self,
        values: Tensor,
        average: Tensor,
        layout: Layout,
        shard: slice,
        hyperparameters: Hyperparameters,
        group: TensorParallelGroup,
        gather: Gather | None,
    ) -> None:
        """values and average: all of the shard; group: holds the other pieces of cut matrices;
        gather: None where the shard is the whole buffer.
        """
        self.values, self.average, self.start = values, average, shard.start
        self.momentum, self.group, self.gather = hyperparameters.momentum, group, gather
        self.matrices = [
            Matrix(entry, first, last, *hyperparameters.of(entry.parameter, entry.global_name))
            for entry in layout.entries
            if entry.parameter.is_hidden_matrix
            and (first := max(entry.first, shard.start)) < (last := min(entry.last, shard.stop))
        ]

    def accumulate(self, gradient: Tensor) -> None:
        """Takes the gradient of a shard's matrices into the momentum, and makes it Nesterov's."""
        average = self.average[: len(gradient)]
        average.lerp_(gradient, 1 - self.momentum)
        gradient.lerp_(average, self.momentum)

    def update(self, momentum: Tensor, learning_rate: float) -> None:
        """Moves the matrices; every rank of the tensor-parallel group and replica must call it.

        momentum: what `accumulate` made, of the whole shard.
        """
        whole = self.gather(momentum.bfloat16()) if self.gather else momentum
        for matrix in self.matrices:
            direction = self._own(matrix.entry, orthogonal(self._matrix(matrix.entry, whole)))
            begin = matrix.entry.first
            direction = direction[matrix.first - begin : matrix.last - begin]
            values = self.values[matrix.first - self.start : matrix.last - self.start]
            rate = learning_rate * matrix.learning_rate_factor
            values.mul_(1 - rate * matrix.weight_decay)
            values.add_(direction, alpha=-rate * matrix.scale)

    def _matrix(self, entry: Entry, buffer: Tensor) -> Tensor:
        """Returns the whole matrix in 16 bits, from what this rank's flat buffer has of it."""
        own, shape = buffer[entry.first : entry.last].bfloat16(), entry.parameter.shape
        if not entry.sharded:
            return own.view(shape)
        pieces = own.new_empty(self.group.size * len(own))
        self.group.all_gather(pieces, own)
        matrix = own.new_empty(shape)
        for index, piece in enumerate(pieces.split(len(own))):
            boxes = entry.parameter.boxes(self.group.size, index)
            parts = piece.split([box.size for box in boxes])
            for box, part in zip(boxes, parts, strict=True):
                matrix[box.within(Box.whole(shape))] = part.view(box.shape)
        return matrix

    def _own(self, entry: Entry, matrix: Tensor) -> Tensor:
        """Returns this rank's part of a matrix, flat as its buffer has it."""
        whole = Box.whole(entry.parameter.shape)
        parts = [matrix[box.within(whole)].flatten() for box in entry.boxes]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def orthogonal(matrix: Tensor) -> Tensor:
    """Returns about the nearest orthogonal matrix, [rows, columns] of 16 bits.

    Operator for operator what torch.optim.Muon runs; its function is private, and other versions of
    torch have it with other arguments.
    """
    a, b, c = COEFFICIENTS
    rows, columns = matrix.shape
    x = matrix.T if rows > columns else matrix
    x = x / x.norm().clamp(min=EPSILON)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if rows > columns else x
