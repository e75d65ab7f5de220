"""Single operators of many shapes: which are measured of a chip, and the figures that fit them.

The figures are those of a chip file's [kernels]; what they say of an operator is heteropp.cost's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy

from heteropp.cost.kernels import kernels_s
from heteropp.cost.tracing.traces import TracedPiece, TracedProduct
from heteropp.description.chips import ChipSpec, Kernels
from heteropp.models.attention_work import backward_flops, forward_flops, seen_pairs
from heteropp.profiling.fitting import ERROR, bent, least_squares

DTYPES = ("float32", "float16", "bfloat16")
LONGEST_S = 0.02  # that an operator takes on a chip at its peak
LEAST_SIDE, LARGEST_SIDE = 16, 8192  # of matrices
LEAST_TOKENS, HEADS, HEAD_SIZES = 64, 4, (64, 128)  # of attention
STEPS = 60  # of the solver, at most


@dataclass(frozen=True, kw_only=True)
class Operator:
    """An operator that a chip can be measured at."""

    kind: Literal["product", "attention", "attention_backward", "move"]
    dtype: str
    # of a product of matrices [.., m, k] and [.., k, n]: how many, m, n, k; of attention: heads,
    # query and key tokens, the head's size; of a move, which adds two vectors: their elements
    sides: tuple[int, ...]
    fit: bool  # or it tells how good the fit is

    @property
    def flops(self) -> int:
        if self.kind == "move":
            return 0
        if self.kind == "product":
            return 2 * math.prod(self.sides)
        heads, length, _, size = self.sides
        flops_of = forward_flops if self.kind == "attention" else backward_flops
        return flops_of(heads * seen_pairs(length), size, size)

    @property
    def bytes(self) -> int:
        """The bytes of all tensors that it reads or writes, each once."""
        itemsize = 4 if self.dtype == "float32" else 2
        if self.kind == "move":
            return 3 * self.sides[0] * itemsize
        count, m, n, k = self.sides
        if self.kind == "product":
            return count * (m * n + n * k + m * k) * itemsize
        tensors = 4 if self.kind == "attention" else 8
        return count * m * (tensors * k * itemsize + 4)  # and a sum of each row, in float32

    def predicted_s(self, chip: ChipSpec) -> float:
        """Returns the seconds that it takes by the chip's [kernels]."""
        if self.kind == "move":
            piece = TracedPiece(((1, False, self.sides[0], self.bytes),), (), (), ())
        else:
            product = TracedProduct(1, self.kind, self.flops, self.bytes, self.sides)
            piece = TracedPiece(((1, True, self.flops, self.bytes),), (product,), (), ())
        return kernels_s(piece, self.dtype, chip)


@dataclass(frozen=True, kw_only=True)
class MeasuredOperator:
    operator: Operator
    seconds: float

    def error(self, chip: ChipSpec) -> float:
        """Returns the relative error of the seconds that the chip's [kernels] say."""
        return self.operator.predicted_s(chip) / self.seconds - 1


def operators_of(chip: ChipSpec, dtype: str) -> list[Operator]:
    """Returns the operators to measure of a chip, for fitting those whose sides are powers of two.

    The largest take about LONGEST_S.
    """
    found = [*_products(chip, dtype), *_attention(chip, dtype), *_moves(chip, dtype)]
    return list(dict.fromkeys(found))


def _products(chip: ChipSpec, dtype: str) -> Iterator[Operator]:
    flops = chip.peak_flops(dtype) * LONGEST_S
    elements = chip.memory.capacity_bytes / 4 / 3 / 4
    most = _power(min((flops / 2) ** (1 / 3), elements**0.5, LARGEST_SIDE))
    for side in _powers(LEAST_SIDE, most):
        for shape in ((side, most, most), (most, side, most), (most, most, side), (side,) * 3):
            yield Operator(kind="product", dtype=dtype, sides=(1, *shape), fit=True)
        between = side * 3 // 2
        if between < most:
            part = most * 3 // 4
            for shape in ((between, part, most), (most // 2, between, most), (part, most, between)):
                yield Operator(kind="product", dtype=dtype, sides=(1, *shape), fit=False)
        if 2 * side <= most:  # several at once, of which there is room for 8
            yield Operator(kind="product", dtype=dtype, sides=(8, side, side, side), fit=True)
            yield Operator(kind="product", dtype=dtype, sides=(4, between, side, side), fit=False)


def _attention(chip: ChipSpec, dtype: str) -> Iterator[Operator]:
    for size in HEAD_SIZES:
        flops = chip.peak_flops(dtype) * LONGEST_S
        elements = chip.memory.capacity_bytes / 4 / 12 / 4
        pairs = flops / (2 * 5 * HEADS * size)
        most = _power(min(pairs**0.5, elements / (HEADS * size), LARGEST_SIDE))
        for tokens in _powers(LEAST_TOKENS, most):
            for count, fit in ((tokens, True), (tokens * 3 // 4, False)):
                sides = HEADS, count, count, size
                yield Operator(kind="attention", dtype=dtype, sides=sides, fit=fit)
                yield Operator(kind="attention_backward", dtype=dtype, sides=sides, fit=fit)


def _moves(chip: ChipSpec, dtype: str) -> Iterator[Operator]:
    bytes_ = min(chip.memory.bandwidth_bytes_per_s * LONGEST_S, chip.memory.capacity_bytes / 4)
    for count in _powers(1, _power(bytes_ / 3 / 4))[::2]:
        yield Operator(kind="move", dtype=dtype, sides=(count,), fit=True)
        yield Operator(kind="move", dtype=dtype, sides=(count * 3,), fit=False)


def _power(most: float) -> int:
    """Returns the largest power of two that is no more, or 1."""
    return 1 << max(0, math.floor(math.log2(most)))


def _powers(least: int, most: int) -> list[int]:
    return [1 << bit for bit in range(least.bit_length() - 1, most.bit_length())] or [least]


def fit_kernels(chip: ChipSpec, measured: Sequence[MeasuredOperator], host_s: float) -> ChipSpec:
    """Returns the chip with the launch time and [kernels] that fit one dtype's operators best.

    Products of other dtypes keep what was measured of them, and so does a micro-batch's beginning,
    which no operator tells. host_s: as [kernels] has it.
    """
    shown = [each for each in measured if each.operator.fit]
    dtype = shown[0].operator.dtype
    quickest_s = min(each.seconds for each in shown)
    efficiency, half_side = f"{dtype}_efficiency", f"{dtype}_half_side"
    bounds = {  # least, usual and most
        "launch_s": (1e-8, quickest_s, quickest_s * 2),
        efficiency: (0.001, 0.5, 1.0),
        half_side: (0.001, 64.0, 4096.0),
        "causal_attention_efficiency": (0.001, 0.5, 4.0),
        "causal_attention_backward_efficiency": (0.001, 0.5, 4.0),
        "bandwidth_share": (0.001, 0.8, 4.0),
    }
    low, usual, high = numpy.log(numpy.array(list(bounds.values()))).T
    old = chip.kernels or Kernels(64.0, 0.5, 0.5, 0.8, 0.0, 0.0)

    def at(values: numpy.ndarray) -> ChipSpec:
        figures = dict(zip(bounds, numpy.exp(values).tolist(), strict=True))
        compute = replace(chip.compute, launch_s=figures.pop("launch_s"))
        return replace(chip, compute=compute, kernels=replace(old, host_s=host_s, **figures))

    def errors(values: numpy.ndarray) -> numpy.ndarray:
        found = at(values)
        return numpy.array([bent(math.log1p(each.error(found)) / ERROR) for each in shown])

    return at(least_squares(errors, usual, low, high, STEPS))
