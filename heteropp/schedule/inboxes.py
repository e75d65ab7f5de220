"""How many boundary tensors a stage receives ahead of their turn, so that no sender waits long.

A tensor that is sent before its receiver comes to it needs a place to wait in. How many are needed
is read off the action tables as they run where every action takes its ideal time and messages take
none: with so many receives posted, that run is possible even where a sender waits until a tensor
has left, and so no order of events can end in a ring of ranks that wait for each other. That run is
native (csrc/planner/most_waiting.cpp).
"""

from __future__ import annotations

from functools import lru_cache

from heteropp import _planner
from heteropp.description.plan import Pipeline, Schedule
from heteropp.schedule.action import Kind
from heteropp.schedule.stage_actions import Part, TableKey, coded_table, links, table_keys

Inbox = tuple[int, int, Kind]  # stage, its ministage, RECV_ACTIVATION or RECV_GRADIENT

KINDS = tuple(Kind)  # by their codes


def received_ahead(schedule: Schedule, pipeline: Pipeline) -> dict[Inbox, int]:
    """Receives posted ahead, at least one, of every inbox of a pipeline."""
    return _received_ahead(table_keys(schedule, pipeline), tuple(links(schedule, pipeline)))


@lru_cache(maxsize=1024)
def _received_ahead(
    keys: tuple[TableKey, ...], between: tuple[tuple[Part, Part], ...]
) -> dict[Inbox, int]:
    """Returns the most tensors that are sent, or begun to be, and not yet received; at least 1."""
    tables = [coded_table(key) for key in keys]
    found = _planner.most_waiting(tables, [(*before, *after) for before, after in between])
    return {(s, k, KINDS[code]): most for s, k, code, most in found}
