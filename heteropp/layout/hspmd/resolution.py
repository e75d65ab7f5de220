"""The communication that leads from one annotation to another, and its bytes (Hetu v2, section 4).

Where the layout over subgroups stays, each subgroup communicates within itself: bottom tier. Where
only that layout changes, subgroups communicate slice by slice: top tier. Everything else is a
batched send/recv, which cannot add summands up: pairs that need that are refused.

Collectives are written out as the sends of their direct algorithm, in which no byte goes to a rank
that holds it: a reduce-scatter or an all-gather is one round, an all-reduce is both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from heteropp.layout.hspmd.annotation import (
    DUPLICATE,
    PARTIAL,
    Annotation,
    AnnotationError,
    DistributedStates,
    Holding,
    Summand,
    holdings,
)
from heteropp.layout.hspmd.routing import (
    BytesPerS,
    HeldBox,
    Link,
    Round,
    Wanted,
    alike,
    route,
    volume_bytes,
)

Kind = Literal[
    "identity",
    "send/recv",
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "split-all-reduce",
    "split-reduce-scatter",
    "split-all-gather",
    "batched send/recv",
]


class ResolutionError(ValueError):
    """A pair of annotations that nothing leads from one to the other; one sentence says why."""


@dataclass(frozen=True)
class CommunicationOperator:
    """A communication operator, among the ranks that run it."""

    kind: Kind
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class CommunicationStep:
    """Communication operators that run beside each other, from one layout to another."""

    operators: tuple[CommunicationOperator, ...]
    source: tuple[Holding, ...]
    target: tuple[Holding, ...]
    wanted: tuple[Wanted, ...]  # of what changes
    itemsize: int
    bytes_per_s: BytesPerS

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """The rounds of transfers that carry the operators out.

        They are found on demand, since a library's collectives would not need them.
        """
        held = [HeldBox(0, h.rank, h.box, h.summand) for h in self.source]
        return tuple(route(held, self.wanted, [self.itemsize], self.bytes_per_s))


@dataclass(frozen=True)
class Communication:
    """Takes a tensor from one annotation to another, step after step."""

    source: Annotation
    target: Annotation
    steps: tuple[CommunicationStep, ...]

    @property
    def kinds(self) -> list[list[Kind]]:
        """The kinds of operators in each step, each kind once."""
        return [list(dict.fromkeys(o.kind for o in step.operators)) for step in self.steps]

    @property
    def rounds(self) -> list[Round]:
        return [round_ for step in self.steps for round_ in step.rounds]

    @property
    def volume_bytes(self) -> dict[Link, int]:
        """What will pass each link, in bytes."""
        return volume_bytes(self.rounds)


@lru_cache(maxsize=4096)
def resolve(
    source: Annotation,
    target: Annotation,
    shape: tuple[int, ...],
    itemsize: int,
    bytes_per_s: BytesPerS = alike,
) -> Communication:
    """The communication that takes a tensor of `shape` from source to target (figure 4).

    Raises AnnotationError where an annotation does not fit the shape, and ResolutionError where
    the pair is not supported.
    """
    here, there = _aligned(source, target)
    holdings(source, shape), holdings(target, shape)  # both fit
    if here == there:
        held = tuple(holdings(here, shape))
        operators = (CommunicationOperator("identity", here.ranks),)
        step = CommunicationStep(operators, held, held, (), itemsize, bytes_per_s)
        return Communication(source, target, (step,))

    def stepped(
        a: Annotation, b: Annotation, operators: Sequence[CommunicationOperator]
    ) -> CommunicationStep:
        source, target = tuple(holdings(a, shape)), tuple(holdings(b, shape))
        wanted = tuple(Wanted(0, h.rank, h.box, _summands(a, b, h)) for h in target)
        return CommunicationStep(tuple(operators), source, target, wanted, itemsize, bytes_per_s)

    if (here.hsize, here.hdim, here.shares) == (there.hsize, there.hdim, there.shares):
        steps = [stepped(here, there, _bottom(here, there, shape))]
    elif here.groups != there.groups:
        _refuse_partial(here, there, "a batched send/recv between unlike subgroups sums nothing")
        every = tuple(sorted({*here.ranks, *there.ranks}))
        steps = [stepped(here, there, [CommunicationOperator("batched send/recv", every)])]
    else:
        if there.partial:
            raise _unsupported(here, there, "where hdim changes, only whole values come of it")
        steps = []
        if here.partial and here.states != there.states:
            middle = replace(here, states=there.states)
            try:
                steps.append(stepped(here, middle, _bottom(here, middle, shape)))
            except AnnotationError as error:
                raise _unsupported(here, there, f"on the way {error}") from None
            here = middle
        steps.append(stepped(here, there, [CommunicationOperator(_top(here, there), here.ranks)]))
    return Communication(source, target, tuple(steps))


def widened(annotation: Annotation, groups: tuple[tuple[int, ...], ...]) -> Annotation | None:
    """The same layout as a union of more device groups (figure 10), or None: it is not one.

    The outermost axis of the distributed states becomes, or joins, the heterogeneous dimension.
    """
    parts, rest = divmod(len(groups), annotation.hsize)
    ranks = tuple(rank for group in groups for rank in group)
    if rest or ranks != annotation.ranks:
        return None
    if parts == 1:
        return annotation if groups == annotation.groups else None
    states: list[DistributedStates] = []
    hdim = annotation.hdim
    for i, laid_out in enumerate(annotation.states):
        if not laid_out.axes:
            return None
        (outer, count), *inner = laid_out.axes
        if count % parts or (outer != hdim and (annotation.hsize > 1 or i)):
            return None
        hdim = outer
        states += [DistributedStates.of([(outer, count // parts), *inner])] * parts
    shares = [share for share in annotation.shares or (1,) * annotation.hsize for _ in range(parts)]
    try:
        pairs = [(g, s.axes) for g, s in zip(groups, states, strict=True)]
        return Annotation.of(pairs, hdim, shares)
    except AnnotationError:  # groups of other sizes
        return None


def _aligned(source: Annotation, target: Annotation) -> tuple[Annotation, Annotation]:
    """Returns both with the same number of subgroups, if the one with fewer can be written so."""
    if source.hsize < target.hsize:
        return widened(source, target.groups) or source, target
    if source.hsize > target.hsize:
        return source, widened(target, source.groups) or target
    return source, target


def _bottom(
    source: Annotation, target: Annotation, shape: tuple[int, ...]
) -> list[CommunicationOperator]:
    """Returns the operators by which each subgroup communicates within itself (section 4.1)."""
    held, wanted = holdings(source, shape), holdings(target, shape)
    return [
        CommunicationOperator(
            _bottom_kind(
                source,
                target,
                i,
                [h for h in held if h.subgroup == i],
                [h for h in wanted if h.subgroup == i],
            ),
            tuple(sorted({*source.groups[i], *target.groups[i]})),
        )
        for i in range(source.hsize)
    ]


def _bottom_kind(
    source: Annotation, target: Annotation, i: int, held: list[Holding], wanted: list[Holding]
) -> Kind:
    before, after = source.states[i], target.states[i]
    same_ranks = source.groups[i] == target.groups[i]
    if before == after:
        return "identity" if same_ranks else "send/recv"
    subgroup = f"subgroup {i} would go from {before} to {after}"
    if before.summands == after.summands == 1:
        return "all-gather" if same_ranks and _within(held, wanted) else "batched send/recv"
    if not same_ranks:
        raise _unsupported(
            source, target, f"{subgroup} between unlike ranks, where only whole values can move"
        )
    if after.summands == 1:
        if [h.box for h in held] == [h.box for h in wanted]:
            return "all-reduce"
        if _within(wanted, held):
            return "reduce-scatter"
        raise _unsupported(
            source, target, f"{subgroup}, where a rank would sum what it holds no summand of"
        )
    kept = [h.summand for h in held] == [h.summand for h in wanted]
    if before.summands == after.summands and kept and _within(held, wanted):
        return "all-gather"
    raise _unsupported(source, target, f"{subgroup}, and nothing makes such summands")


def _top(source: Annotation, target: Annotation) -> Kind:
    """Returns the kind of operator where hdim changes and the ranks do not (section 4.2)."""
    if source.hdim == PARTIAL:
        return "split-all-reduce" if target.hdim == DUPLICATE else "split-reduce-scatter"
    if source.states == target.states and target.hdim == DUPLICATE:
        return "split-all-gather"
    return "batched send/recv"


def _summands(
    source: Annotation, target: Annotation, wanted: Holding
) -> tuple[Summand | None, ...]:
    """Returns the summands that a rank must add up for the box that it shall hold."""
    if source.hdim == PARTIAL != target.hdim:
        return tuple((i, 0) for i in range(source.hsize))
    if source.groups == target.groups or source.hsize == target.hsize:
        before = source.states[wanted.subgroup].summands
        if before > target.states[wanted.subgroup].summands:
            return tuple((wanted.subgroup, summand) for summand in range(before))
    return (wanted.summand,)


def _within(inner: list[Holding], outer: list[Holding]) -> bool:
    """Whether each rank's inner box is a part of its outer box."""
    pairs = zip(inner, outer, strict=True)
    return all(a.box.intersect(b.box) == a.box for a, b in pairs)


def _refuse_partial(source: Annotation, target: Annotation, reason: str) -> None:
    if source.partial or target.partial:
        raise _unsupported(source, target, reason)


def _unsupported(source: Annotation, target: Annotation, reason: str) -> ResolutionError:
    return ResolutionError(f"no communication leads from {source} to {target}: {reason}")
