"""What stages of any number of blocks cost, of those of one block and of two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from heteropp.cost.tracing.traces import BlockTraces, StageTrace, StageTraces

Terms = tuple[float, ...]  # mostly seconds, of a stage


@dataclass(frozen=True, eq=False)
class _BlockTerms:
    """Some terms of stages whose blocks are of one kind, found where they are asked for."""

    blocks: BlockTraces
    terms: Callable[[StageTrace], Terms]

    @cached_property
    def one(self) -> Terms:
        """The terms of a stage of one block."""
        return self.terms(self.blocks.one)

    @cached_property
    def more(self) -> Terms:
        """What a further block adds to each."""
        two = self.terms(self.blocks.two)
        return tuple([max(0.0, b - a) for a, b in zip(self.one, two, strict=True)])


KindTerms = tuple[_BlockTerms, ...]


def by_kind(traces: StageTraces, terms: Callable[[StageTrace], Terms]) -> KindTerms:
    """Returns some terms of stages, by kind of block."""
    return tuple(_BlockTerms(kind, terms) for kind in traces.kinds)


def for_blocks(kinds: KindTerms, layers: int) -> Terms:
    """Returns the terms of a stage of so many blocks.

    Gradients of two blocks may be summed by another algorithm, in less time than those of one:
    a further block then adds nothing.
    """
    first, *others = kinds
    if not others:
        if layers == 1:
            return first.one
        pairs = zip(first.one, first.more, strict=True)
        return tuple([a + (layers - 1) * more for a, more in pairs])
    result = [a - more for a, more in zip(first.one, first.more, strict=True)]
    for kind in kinds:
        for i, more in enumerate(kind.more):
            result[i] += layers * kind.blocks.share * more
    return tuple(result)
