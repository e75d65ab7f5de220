"""The parts of a shard of a flat buffer whose parameters have one setting."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from heteropp.layout.flat_buffer import Entry, Layout


class Run(NamedTuple):
    """Elements [first, last) of a shard, and their setting."""

    first: int
    last: int
    setting: float


def runs(layout: Layout, shard: slice, setting_of: Callable[[Entry], float]) -> list[Run]:
    """Returns the runs that make up a shard, in order; neighbours have unlike settings.

    A gap between two parameters belongs to the one before it.
    """
    found: list[Run] = []
    entries = layout.entries
    ends = [entry.first for entry in entries[1:]] + [layout.size] * bool(entries)
    for entry, end in zip(entries, ends, strict=True):
        first, last = max(entry.first, shard.start), min(end, shard.stop)
        if first >= last:
            continue
        first, last, setting = first - shard.start, last - shard.start, setting_of(entry)
        if found and found[-1].setting == setting:
            first = found.pop().first
        found.append(Run(first, last, setting))
    return found
