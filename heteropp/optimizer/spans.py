"""The parts of a shard of a flat buffer that one group's settings are for."""

from __future__ import annotations

from dataclasses import dataclass

from heteropp.description.hyperparameters import Hyperparameters
from heteropp.layout.flat_buffer import Layout


@dataclass(frozen=True)
class Span:
    """Elements [first, last) of a shard."""

    first: int
    last: int
    learning_rate_factor: float
    weight_decay: float


def spans(layout: Layout, shard: slice, hyperparameters: Hyperparameters) -> list[Span]:
    """Returns the spans that make up a shard, in order; neighbours have unlike settings.

    A gap between two parameters belongs to the one before it.
    """
    found: list[Span] = []
    entries = layout.entries
    ends = [entry.first for entry in entries[1:]] + [layout.size]
    for entry, end in zip(entries, ends, strict=True):
        first, last = (max(at, shard.start) - shard.start for at in (entry.first, end))
        last = min(last, shard.stop - shard.start)
        if first >= last:
            continue
        settings = hyperparameters.of(entry.parameter, entry.global_name)
        if found and (found[-1].learning_rate_factor, found[-1].weight_decay) == settings:
            first = found.pop().first
        found.append(Span(first, last, *settings))
    return found
