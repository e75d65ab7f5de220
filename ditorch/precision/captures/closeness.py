"""How far apart two runs are at one call, by the statistics of its tensors alone.

Distances are l2 norms of differences, relative to what the call computes with. Two right chips
differ by rounding, and each call passes on the differences of its inputs, somewhat enlarged; a call
whose outputs are further apart than both explain departs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import hypot, inf, sqrt
from typing import Any

import torch

from ditorch.precision.captures.records import CallRecord, TensorUse
from ditorch.precision.captures.statistics import Statistics, distance
from ditorch.precision.standards import Standards
from ditorch.precision.verdict import compute_eps

# How much an operator may enlarge the relative distance of its inputs, as a norm: functions such as
# exp or a difference of near-equal numbers do so; a wrong kernel does so from no distance at all.
GAIN = 32.0

_QUOTIENT = re.compile(r"div|sqrt|reciprocal|log|pow|sign|round|floor|ceil|trunc")
_EXACT = frozenset(("bool", "uint8", "int8", "int16", "int32", "int64"))


@dataclass(frozen=True)
class Side:
    """One run's record of a call, and the statistics of that step's tensors."""

    call: CallRecord
    statistics: Mapping[str, Statistics]

    def of(self, use: TensorUse) -> Statistics | None:
        return self.statistics.get(use.digest)


@dataclass(frozen=True)
class Closeness:
    """Relative distances between two runs at one call."""

    inputs: float  # the largest among the inputs of `tensor`; 0 if all are bitwise equal
    tensor: str  # the output whose distance is the largest share of what is allowed
    output: float
    allowed: float

    @property
    def departs(self) -> bool:
        return self.excess > 1

    @property
    def excess(self) -> float:
        """The share of what is allowed."""
        if self.output == 0:
            return 0.0
        return self.output / self.allowed if self.allowed else inf


def closeness(ours: Side, theirs: Side, standards: Standards) -> Closeness:
    """Compares a call in a reference run (`ours`) with the same call in another run.

    What the standard grants the operator, in the coarsest dtype of the call, counts twice: both
    runs round.
    """
    distances = input_distances(ours, theirs)
    found = []
    for use, other in zip(ours.call.outputs, theirs.call.outputs, strict=False):
        inputs = max((d for name, d in distances.items() if _feeds(name, use, ours)), default=0.0)
        output = _distance(ours.of(use), theirs.of(other), _scale(ours, use))
        if use.dtype in _EXACT and inputs > 0:
            continue  # a rounding error decides a comparison, and nothing is wrong with it
        allowed = _rounding(standards, ours.call, use) + _passed_on(ours.call, inputs)
        found.append(Closeness(inputs, use.name, output, allowed))
    return max(found, key=lambda each: each.excess, default=Closeness(0.0, "", 0.0, 0.0))


def input_distances(ours: Side, theirs: Side) -> dict[str, float]:
    """Relative distances between two runs' inputs of one call, by name; numbers as "" ."""
    distances = {
        use.name: 1.0 if use.dtype in _EXACT and use.digest != other.digest
        else _distance(ours.of(use), theirs.of(other), 0.0)
        for use, other in zip(ours.call.inputs, theirs.call.inputs, strict=False)
        if use.digest and other.digest
    }  # fmt: skip
    numbers = zip(_numbers(ours.call), _numbers(theirs.call), strict=False)
    apart = [abs(a - b) / max(abs(a), abs(b)) for a, b in numbers if a != b]
    return distances | {"": max(apart, default=0.0)}


def shapes_agree(uses: list[TensorUse], others: list[TensorUse]) -> bool:
    return [use.shape for use in uses] == [other.shape for other in others]


def reduction_length(call: CallRecord, output: TensorUse) -> int:
    """How many products or terms make up one element of `output`, as far as shapes tell."""
    sizes = sorted((_elements(use) for use in call.inputs), reverse=True)
    made = max(_elements(output), 1)
    if is_product(call) and len(sizes) > 1:
        return max(1, round(sqrt(sizes[0] * sizes[1] / made)))
    return max(1, sizes[0] // made) if sizes else 1


def is_product(call: CallRecord) -> bool:
    """Whether the operator is a product of matrices."""
    name = call.operator.split(".")[1]
    return name.endswith(("mm", "mm_", "addmv", "mv", "dot", "linear")) or "convolution" in name


def _feeds(name: str, output: TensorUse, side: Side) -> bool:
    """Whether the input goes into the output: lists of tensors are computed one by one."""
    if "._foreach_" not in side.call.operator or "." not in name:
        return True
    return name.partition(".")[2] == output.name.partition(".")[2]


def _distance(ours: Statistics | None, theirs: Statistics | None, scale: float) -> float:
    if ours is None or theirs is None or ours.digest == theirs.digest:
        return 0.0
    if (ours.elements, ours.nans, ours.infs) != (theirs.elements, theirs.nans, theirs.infs):
        return inf
    apart = distance(ours, theirs)
    return apart / (max(ours.norm, scale) or theirs.norm or 1.0)


def _scale(side: Side, output: TensorUse) -> float:
    """The magnitude `output` is computed with, where it may be small for being a difference.

    Errors of a sum are relative to its terms: a gradient that is 0 but for rounding has no digits.
    """
    call = side.call
    floats = [side.of(use) for use in call.inputs if use.dtype not in _EXACT]
    norms = sorted(each.norm for each in floats if each is not None)
    length = reduction_length(call, output)
    name = call.operator.split(".")[1]
    if not norms:
        return 0.0
    if is_product(call):
        return norms[-1] * norms[-2 if len(norms) > 1 else -1] / sqrt(length)
    if name.startswith("mean"):
        return norms[-1] / length
    if length > 1 or name.startswith(("add", "sub", "rsub")):
        return hypot(*norms)
    return 0.0


def _rounding(standards: Standards, call: CallRecord, output: TensorUse) -> float:
    """How far apart rounding alone may bring `output`, relatively."""
    numbers = standards.numbers_of(call.operator)
    dtypes = [getattr(torch, use.dtype, None) for use in (*call.inputs, output)]
    floats = [dtype for dtype in dtypes if dtype is not None and _is_floating(dtype)]
    if not floats or numbers.rule == "equal":
        return 0.0
    coarsest = max(floats, key=lambda dtype: torch.finfo(dtype).eps)
    length = reduction_length(call, output)
    roundings = numbers.roundings.of(coarsest) + numbers.sums * sqrt(length)
    unit = torch.finfo(coarsest).eps
    kept = unit if numbers.keeps == "result" else compute_eps(coarsest)
    return 2 * (numbers.ulps.of(coarsest) * unit + roundings * kept)


def _passed_on(call: CallRecord, inputs: float) -> float:
    """How far apart the outputs may be for their inputs' sake.

    A quotient has any value where its divisor is within the inputs' distance of 0; that is about
    such a share of the elements, whose norm goes with the root of their number.
    """
    return GAIN * (sqrt(inputs) if _QUOTIENT.search(call.operator) else inputs)


def _numbers(call: CallRecord) -> Iterator[float]:
    def visit(value: Any) -> Iterator[float]:
        if isinstance(value, float):  # not int: a dimension may be called 1 or -1
            yield value
        elif isinstance(value, list):
            for each in value:
                yield from visit(each)

    yield from visit(call.arguments)
    yield from visit(list(call.keywords.values()))


def _elements(use: TensorUse) -> int:
    count = 1
    for size in use.shape:
        count *= size
    return count


def _is_floating(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
