"""How many boundary tensors a stage receives ahead of their turn, so that no sender waits long.

A tensor that is sent before its receiver comes to it needs a place to wait in. How many are needed
is read off the action tables as they run where every action takes its ideal time and messages take
none: with so many receives posted, that run is possible even where a sender waits until a tensor
has left, and so no order of events can end in a ring of ranks that wait for each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush

from heteropp.description.plan import Pipeline, Schedule
from heteropp.schedule.action import Action, Kind
from heteropp.schedule.stage_actions import Part, TableKey, links, table_key, table_of

Inbox = tuple[int, int, Kind]  # stage, its ministage, RECV_ACTIVATION or RECV_GRADIENT

IDEAL_S = {Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1}
SENDS = (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)


def received_ahead(schedule: Schedule, pipeline: Pipeline) -> dict[Inbox, int]:
    """Receives posted ahead, at least one, of every inbox of a pipeline."""
    keys = tuple(table_key(schedule, pipeline, s) for s in range(len(pipeline.stages)))
    return _received_ahead(keys, tuple(links(schedule, pipeline)))


@lru_cache(maxsize=1024)
def _received_ahead(
    keys: tuple[TableKey, ...], between: tuple[tuple[Part, Part], ...]
) -> dict[Inbox, int]:
    return most_waiting([table_of(key) for key in keys], between)


def most_waiting(
    tables: Sequence[Sequence[Action]], between: Sequence[tuple[Part, Part]]
) -> dict[Inbox, int]:
    """The most tensors that are sent, or begun to be, and not yet received; at least one."""
    count = Counter((s, a.ministage, a.kind) for s, table in enumerate(tables) for a in table)
    inbox_of: dict[Inbox, Inbox] = {}  # by the part and kind of the send
    for before, after in between:
        inbox_of[*before, Kind.SEND_ACTIVATION] = *after, Kind.RECV_ACTIVATION
        inbox_of[*after, Kind.SEND_GRADIENT] = *before, Kind.RECV_GRADIENT
    sends = {inbox: count[end] for end, inbox in inbox_of.items() if end in count}
    result = dict.fromkeys(sends, 1)
    sent: Counter[Inbox] = Counter()
    received: Counter[Inbox] = Counter()
    waits: set[int] = set()  # stages, for what is not sent yet
    at = [0] * len(tables)
    # when each stage comes to its next action; of one moment's a send is the last
    coming: list[tuple[int, bool, int]] = []

    def come(s: int, when: int) -> None:
        if at[s] < len(tables[s]):
            heappush(coming, (when, tables[s][at[s]].kind in SENDS, s))

    for s in range(len(tables)):
        come(s, 0)
    while coming:
        now, _, s = heappop(coming)
        action = tables[s][at[s]]
        end = s, action.ministage, action.kind
        if end in sends:
            # where micro-batches are unlike, several sends make a tensor, or one several
            if sent[end] * count[end] // sends[end] == received[end]:
                waits.add(s)
                continue
            received[end] += 1
        at[s] += 1
        if action.kind in SENDS:
            inbox = inbox_of[end]
            sent[inbox] += 1
            begun = -(-sent[inbox] * count[inbox] // sends[inbox])
            result[inbox] = max(result[inbox], begun - received[inbox])
            if inbox[0] in waits:
                waits.remove(inbox[0])
                come(inbox[0], now)
        come(s, now + IDEAL_S.get(action.kind, 0))
    assert at == [len(table) for table in tables], "a schedule in which stages wait for ever"
    return result
