"""Slices of sequences, from recordings of a few others.

A plan may have sixteen slices, and a search thousands. All that is counted of one, though, is a
polynomial of its tokens t and of the last of them, l: each operator looks at its own tokens, or at
each of these together with those before, so that the terms are 1, t, l, t l and t^2. Five
recordings tell all of it, or three where there are no tokens before; one more checks them. That is
not so of a kernel that looks through a window, nor where experts have no whole number of a slice's
rows each: such slices are recorded themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from functools import lru_cache

from heteropp.cost.tracing.kind import StageKind
from heteropp.cost.tracing.operators import Trace, TracedOperator
from heteropp.cost.tracing.scores import kernel_takes_parts
from heteropp.cost.tracing.stage import Recording, record_stage
from heteropp.models.spec import ModelSpec

UNIT = 8  # tokens of each tensor-parallel rank, at least; slices are recorded at a few of these
FIRST = ((1, 1), (2, 2), (3, 3), (4, 4))  # tokens, and the last of them, in units
LATER = ((1, 6), (2, 6), (3, 6), (1, 4), (2, 4), (3, 4))  # the last one checks the others
FEWEST = 8  # units of a sequence, of which a slice is not recorded as it is

Weights = tuple[int, ...]  # of recordings; their sums are so many times the size
Values = Sequence[int]  # of one size, by recording


class _UnlikeError(Exception):
    """Recordings of slices that tell nothing of others."""


def record_slice(model: ModelSpec, layers: int, kind: StageKind) -> Recording:
    """Returns what record_stage does for a stage that runs slices, mostly without running it."""
    assert kind.token_shares is not None
    tokens, last = kind.token_shares[kind.cp_index], sum(kind.token_shares[: kind.cp_index + 1])
    known = _known(model, layers, replace(kind, token_shares=None, cp_index=int(tokens < last)))
    try:
        return _combined(known, *_weights(tokens, last, _unit(model, kind)))
    except _UnlikeError:
        return record_stage(model, layers, kind)


@lru_cache(maxsize=256)
def _known(model: ModelSpec, layers: int, kind: StageKind) -> list[Recording]:
    """Returns recordings that tell of all slices; none where these have been found not to.

    kind: with no slices of its own; its cp_index says whether there are tokens before.
    """
    unit, length = _unit(model, kind), model.sequence_length
    if length <= FEWEST * unit or not kernel_takes_parts(model):
        return []
    points = LATER if kind.cp_index else FIRST
    found = []
    for tokens, last in points:
        shares = filter(None, ((last - tokens) * unit, tokens * unit, length - last * unit))
        found.append(record_stage(model, layers, replace(kind, token_shares=tuple(shares))))
    *known, check = found
    tokens, last = points[-1]
    try:
        told = _combined(known, *_weights(tokens * unit, last * unit, unit))
    except _UnlikeError:
        return []
    return known if told == check else []


def _unit(model: ModelSpec, kind: StageKind) -> int:
    """Returns so many tokens that every expert has a whole number of their rows, and some."""
    return math.lcm(UNIT * kind.tp, max(1, model.expert_count))


def _weights(tokens: int, last: int, unit: int) -> tuple[Weights, int]:
    return (_later if tokens < last else _first)(tokens, last, unit)


def _first(tokens: int, last: int, unit: int) -> tuple[Weights, int]:
    """Returns Lagrange's weights for a first slice, and what their sums are to be divided by."""
    one, two, three = (tokens - n * unit for n in (1, 2, 3))
    return (two * three, -2 * one * three, one * two), 2 * unit**2


def _later(tokens: int, last: int, unit: int) -> tuple[Weights, int]:
    """Returns the same for a slice after others: what a further token before it adds is affine in
    its tokens, of which those of four units and of six tell.
    """
    (first, second, third), divisor = _first(tokens, last, unit)
    further = last - 6 * unit
    of_one, of_two = further * (2 * unit - tokens), further * (tokens - unit)
    return (first + of_one, second + of_two, third, -of_one, -of_two), divisor


def _combined(recordings: Sequence[Recording], weights: Weights, divisor: int) -> Recording:
    """Returns a recording each of whose sizes is the weighed sum of those of others. Raises
    _UnlikeError.
    """

    def size(values: Values) -> int:
        quotient, rest = divmod(sum(map(int.__mul__, values, weights)), divisor)
        if rest:
            raise _UnlikeError
        return quotient

    if not recordings:
        raise _UnlikeError
    model = recordings[0]
    _same((r.events, r.spans) for r in recordings)
    return Recording(
        pieces={
            name: _combined_trace([r.pieces[name] for r in recordings], size)
            for name in model.pieces
        },
        sizes_bytes={
            name: size([r.sizes_bytes[name] for r in recordings]) for name in model.sizes_bytes
        },
        tensors_bytes=_sizes([r.tensors_bytes for r in recordings], size),
        events=model.events,
        spans=model.spans,
    )


def _combined_trace(traces: Sequence[Trace], size: Callable[[Values], int]) -> Trace:
    messages = (f.name for f in fields(Trace) if f.name not in ("operators", "overlaps"))
    _same((len(trace.operators), len(trace.overlaps)) for trace in traces)
    return Trace(
        operators=[
            _combined_operator(alike, size)
            for alike in zip(*(trace.operators for trace in traces), strict=True)
        ],
        overlaps=[
            _combined_trace(alike, size)
            for alike in zip(*(trace.overlaps for trace in traces), strict=True)
        ],
        **{name: _sizes([getattr(trace, name) for trace in traces], size) for name in messages},
    )


def _combined_operator(
    alike: Sequence[TracedOperator], size: Callable[[Values], int]
) -> TracedOperator:
    _same((op.name, op.product) for op in alike)
    return replace(
        alike[0],
        counts=tuple(_sizes([op.counts for op in alike], size)),
        bytes=size([op.bytes for op in alike]),
        sides=tuple(_sizes([op.sides for op in alike], size)),
    )


def _sizes(lists: Sequence[Sequence[int]], size: Callable[[Values], int]) -> list[int]:
    _same(map(len, lists))
    return [size(values) for values in zip(*lists, strict=True)]


def _same(values: Iterable[object]) -> None:
    first, *others = values
    if any(other != first for other in others):
        raise _UnlikeError
