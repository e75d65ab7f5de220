"""What an operator makes of its operands' annotations (Hetu v2, section 5.2).

An operator is told by labels: each dimension of an operand and of a result has one, dimensions that
run together have the same, and one that no result has is summed over. One rule then serves every
axis along which a tensor is laid out, of the top tier as of the bottom: operands with a label are
all split along it or none is; a sum over a split dimension is partial; and what the operator must
see together may not be split. Nothing is communicated: where operands do not go together, the user
must insert a communication operator, and the error says before which.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from heteropp.layout.hspmd.annotation import (
    DUPLICATE,
    PARTIAL,
    Annotation,
    AnnotationError,
    DistributedStates,
    holdings,
)
from heteropp.layout.hspmd.resolution import widened

Shape = Sequence[int]
Labels = tuple[str, ...]


class DeductionError(ValueError):
    """Operands that do not go together; one sentence says which, and what was expected."""


@dataclass(frozen=True)
class Operand:
    name: str
    annotation: Annotation


@dataclass(frozen=True)
class OperatorRule:
    """What `deduce` must know of an operator."""

    name: str
    inputs: tuple[Labels, ...]
    outputs: tuple[Labels, ...]
    whole: frozenset[str] = frozenset()  # labels of dimensions that it must see together
    linear: frozenset[int] = frozenset()  # operands, each alone, that may be partial
    additive: bool = False  # all operands may be partial together


def deduce(
    operator: OperatorRule, operands: Sequence[Operand], shapes: Sequence[Shape]
) -> list[Annotation]:
    """The annotations of the results, of these shapes. Raises DeductionError."""
    aligned = _aligned(operator, operands)
    groups = aligned[0].annotation.groups
    by_subgroup = [_axes(operator, aligned, i) for i in range(len(groups))]
    results = []
    for labels, shape in zip(operator.outputs, shapes, strict=True):
        roles = [operand.annotation.hdim for operand in aligned]
        hdim = _role(operator, aligned, roles, labels)
        shares = _shares(operator, aligned) if hdim >= 0 else None
        pairs = [
            (ranks, [(_role(operator, aligned, r, labels), n) for r, n in axes])
            for ranks, axes in zip(groups, by_subgroup, strict=True)
        ]
        result = Annotation.of(pairs, hdim, shares)
        try:
            holdings(result, shape)
        except AnnotationError as error:
            raise DeductionError(f"{operator.name} cannot make its result: {error}") from None
        results.append(result)
    return results


def without_sums(annotation: Annotation) -> Annotation:
    """The layout of a gradient: what is partial has duplicates in its place."""
    pairs = [
        (ranks, [(DUPLICATE if d == PARTIAL else d, parts) for d, parts in states.axes])
        for ranks, states in zip(annotation.groups, annotation.states, strict=True)
    ]
    hdim = DUPLICATE if annotation.hdim == PARTIAL else annotation.hdim
    return Annotation.of(pairs, hdim, annotation.shares or None)


def cut_alike(operator: OperatorRule, operands: Sequence[Operand]) -> list[Annotation]:
    """Operands with their duplicates cut as others are split: every rank holds its part already."""
    aligned = _aligned(operator, operands)
    hdims = _cut(operator, [operand.annotation.hdim for operand in aligned])
    shares = next((o.annotation.shares for o in aligned if o.annotation.hdim >= 0), None)
    groups = aligned[0].annotation.groups
    axes = [
        [(_cut(operator, roles), parts) for roles, parts in _axes(operator, aligned, i)]
        for i in range(len(groups))
    ]
    return [
        Annotation.of(
            [
                (ranks, [(roles[k], parts) for roles, parts in found])
                for ranks, found in zip(groups, axes, strict=True)
            ],
            hdims[k],
            operand.annotation.shares or shares,
        )
        for k, operand in enumerate(aligned)
    ]


# ---------------------------------------------------------------- operators


def elementwise(
    name: str, shapes: Sequence[Shape], linear: Collection[int] = (), additive: bool = False
) -> OperatorRule:
    """An elementwise operator, whose operands of these shapes are broadcast."""
    dimensions = max(len(shape) for shape in shapes)
    output = tuple(f"d{i}" for i in range(dimensions))
    sizes = [
        max(s[i - dimensions + len(s)] for s in shapes if i >= dimensions - len(s))
        for i in range(dimensions)
    ]
    inputs = tuple(
        tuple(
            f"d{i}" if shape[i - dimensions + len(shape)] == sizes[i] else f"one{k}.{i}"
            for i in range(dimensions - len(shape), dimensions)
        )
        for k, shape in enumerate(shapes)
    )
    return OperatorRule(name, inputs, (output,), linear=frozenset(linear), additive=additive)


def matmul(name: str, one: int, other: int) -> OperatorRule:
    """The product of [batch ..., m, k] and [batch ..., k, n] or [k, n].

    one, other: the operands' numbers of dimensions.
    """
    batch = tuple(f"b{i}" for i in range(one - 2))
    return OperatorRule(
        name,
        ((*batch, "m", "k"), (*batch[one - other :], "k", "n")),
        ((*batch, "m", "n"),),
        linear=frozenset({0, 1}),
    )


def reduction(name: str, dimensions: int, over: Collection[int], keep: bool) -> OperatorRule:
    """A sum over some dimensions of a tensor."""
    labels = tuple(f"d{i}" for i in range(dimensions))
    kept = ((f"one{i}" if i in over else label) for i, label in enumerate(labels))
    output = tuple(label for i, label in enumerate(kept) if keep or i not in over)
    return OperatorRule(name, (labels,), (output,), linear=frozenset({0}))


def reshape(name: str, before: Shape, after: Shape) -> OperatorRule:
    """A reshape that merges or splits dimensions; only the outermost of merged ones may be cut.

    Raises DeductionError for a tensor without elements.
    """
    if 0 in before:
        raise DeductionError(f"{name} takes an empty tensor {list(before)}; expected elements")
    first: list[str] = [f"before{i}" for i in range(len(before))]
    second: list[str] = [f"after{i}" for i in range(len(after))]
    whole = {label for label in first}
    i = j = 0
    while i < len(before) and j < len(after):
        if before[i] == 1 and after[j] != 1:
            i += 1
            continue
        if after[j] == 1 and before[i] != 1:
            j += 1
            continue
        first[i] = second[j] = f"d{i}"
        ours, theirs = before[i], after[j]
        i, j = i + 1, j + 1
        while ours != theirs:
            if ours < theirs:
                ours, i = ours * before[i], i + 1
            else:
                theirs, j = theirs * after[j], j + 1
    return OperatorRule(
        name, (tuple(first),), (tuple(second),), frozenset(whole & set(first)), frozenset({0})
    )


def transpose(name: str, order: Sequence[int]) -> OperatorRule:
    """A permutation of dimensions, where dimension i of the result is the operand's order[i]."""
    labels = tuple(f"d{i}" for i in range(len(order)))
    return OperatorRule(name, (labels,), (tuple(labels[i] for i in order),), linear=frozenset({0}))


def embedding(name: str, dimensions: int) -> OperatorRule:
    """Looks tokens up in a table [vocab, hidden]; a split vocabulary makes the result a sum."""
    rows = tuple(f"r{i}" for i in range(dimensions))
    return OperatorRule(
        name, (("vocab", "hidden"), rows), ((*rows, "hidden"),), linear=frozenset({0})
    )


def normalisation(name: str, dimensions: int, over: int) -> OperatorRule:
    """Normalises x over its last dimensions, with weight and bias.

    The results are the normalised tensor, the mean and 1 / deviation.
    """
    rows = tuple(f"r{i}" for i in range(dimensions - over))
    inner = tuple(f"n{i}" for i in range(over))
    kept = (*rows, *(f"one{i}" for i in range(over)))
    return OperatorRule(
        name, ((*rows, *inner), inner, inner), ((*rows, *inner), kept, kept), frozenset(inner)
    )


def softmax(name: str, dimensions: int, over: int, operands: int = 1) -> OperatorRule:
    """A softmax over one dimension, or with two operands its backward, which takes the gradient, in
    which it is linear, and the result.
    """
    labels = tuple(f"d{i}" for i in range(dimensions))
    linear = frozenset({0}) if operands > 1 else frozenset[int]()
    return OperatorRule(name, (labels,) * operands, (labels,), frozenset({f"d{over}"}), linear)


def attention(name: str, dimensions: int) -> OperatorRule:
    """Query, key and value [batch ..., sequence, head]; results: output, log-sum-exp of rows.

    Every sequence and every head is seen together.
    """
    batch = tuple(f"b{i}" for i in range(dimensions - 2))
    return OperatorRule(
        name,
        ((*batch, "q", "d"), (*batch, "k", "d"), (*batch, "k", "v")),
        ((*batch, "q", "v"), (*batch, "q")),
        frozenset({"q", "k", "d", "v"}),
    )


def loss(name: str) -> OperatorRule:
    """Log-probabilities [rows, classes] and targets [rows]; the sum over rows of what is picked."""
    return OperatorRule(name, (("r", "c"), ("r",)), ((),), frozenset({"c"}))


# ---------------------------------------------------------------- one axis


def _aligned(operator: OperatorRule, operands: Sequence[Operand]) -> list[Operand]:
    """Returns the operands under one union of device groups, the largest among theirs (figure 10).

    Raises DeductionError for an operand that cannot be divided so.
    """
    largest = max(operands, key=lambda operand: operand.annotation.hsize)
    groups = largest.annotation.groups
    result = []
    for operand in operands:
        annotation = widened(operand.annotation, groups)
        if annotation is None:
            raise _error(operator, operand, f"the groups {_groups(groups)} of its {largest.name}")
        result.append(Operand(operand.name, annotation))
    return result


def _groups(groups: tuple[tuple[int, ...], ...]) -> str:
    return ", ".join(str(list(group)) for group in groups)


def _role(
    operator: OperatorRule, operands: Sequence[Operand], roles: Sequence[int], output: Labels
) -> int:
    """What one axis of the result is, from what it is of each operand."""
    partial = [k for k, role in enumerate(roles) if role == PARTIAL]
    split = [k for k, role in enumerate(roles) if role >= 0]
    if partial:
        k = partial[0]
        together = operator.additive and len(partial) == len(roles)
        if together or (partial == [k] and k in operator.linear and not split):
            return PARTIAL
        raise _error(operator, operands[k], "its values, not summands of them")
    if not split:
        return DUPLICATE
    k = split[0]
    label = operator.inputs[k][roles[k]]
    if label in operator.whole:
        raise _error(operator, operands[k], f"dimension {roles[k]} whole")
    for other, labels in enumerate(operator.inputs):
        expected = labels.index(label) if label in labels else DUPLICATE
        if roles[other] != expected:
            how = f"split along dimension {expected}" if expected >= 0 else "duplicates"
            where = f"where its {operands[k].name} is split along dimension {roles[k]}"
            raise _error(operator, operands[other], f"{how} {where}")
    return output.index(label) if label in output else PARTIAL


def _shares(operator: OperatorRule, operands: Sequence[Operand]) -> tuple[int, ...]:
    first, *others = [o for o in operands if o.annotation.hdim >= 0]
    for other in others:
        if other.annotation.shares != first.annotation.shares:
            raise _error(
                operator, other, f"shares {list(first.annotation.shares)} as its {first.name} has"
            )
    return first.annotation.shares


def _axes(
    operator: OperatorRule, operands: Sequence[Operand], subgroup: int
) -> list[tuple[list[int], int]]:
    """Returns the operands' roles in each axis, and its number of parts.

    All operands' axes are first cut wherever an axis of any of them ends.
    """
    found = [_inner_first(operand.annotation.states[subgroup]) for operand in operands]
    result: list[tuple[list[int], int]] = []
    inner = 1
    for cut in sorted({size for axes in found for size, _ in axes}):
        parts, rest = divmod(cut, inner)
        if rest:
            like = f"axes that go with those of its {operands[0].name}"
            raise _error(operator, operands[-1], like)
        roles = [next(role for size, role in axes if size >= cut) for axes in found]
        result.insert(0, (roles, parts))
        inner = cut
    return result


def _cut(operator: OperatorRule, roles: Sequence[int]) -> list[int]:
    """Returns the operands' roles in one axis, duplicates cut like the first operand that is
    split.
    """
    k = next((k for k, role in enumerate(roles) if role >= 0), None)
    if k is None:
        return list(roles)
    label = operator.inputs[k][roles[k]]
    return [
        labels.index(label) if role == DUPLICATE and label in labels else role
        for role, labels in zip(roles, operator.inputs, strict=True)
    ]


def _inner_first(states: DistributedStates) -> list[tuple[int, int]]:
    """Returns the axes from the innermost on, as (ranks in it and further inside, dimension)."""
    return [
        (math.prod(parts for _, parts in states.axes[i:]), states.axes[i][0])
        for i in reversed(range(len(states.axes)))
    ]


def _error(operator: OperatorRule, operand: Operand, expected: str) -> DeductionError:
    return DeductionError(
        f"{operator.name} cannot take its {operand.name} as {operand.annotation}: expected "
        f"{expected}; insert a communication operator before it"
    )
