"""Plays tables of actions on given seconds, event by event.

An actor works through its table. A message leaves when it is sent and flows through its pipes at
once: it enters the next as soon as one begins to serve it. Each pipe serves messages one after
another, first come, first served, at its whole bandwidth. Sends do not hold the
sender, unless they are to (`hold`: until their messages have arrived), or unless only so many may
be unmatched (`slack`), as with a transport that buffers nothing.

Actors run ahead on their own; only sends, which compete for pipes, go through one queue of
events in the order of time. With `slack` receives do too. The queue is native: a search plays
thousands of steps (csrc/planner/engine.cpp).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from heteropp import _planner

WORK, SEND, RECV, MARK = range(4)  # MARK takes no time
Op = tuple[int, int, int]  # one of the four, its slot, and the micro-batch of a message


class Transmission(NamedTuple):
    """One message that a send makes."""

    receiver: int  # actor
    inbox: int  # of the receiver
    latency_s: float
    pipes: tuple[tuple[int, float], ...]  # each with the seconds that the message fills it


@dataclass(frozen=True, eq=False)
class Ops:
    """A table of ops, which the native engine gets in its own form, made once."""

    table: Sequence[Op]

    @cached_property
    def native(self) -> _planner.Ops:
        return _planner.Ops(self.table)


@dataclass(frozen=True, eq=False)
class Boxes:
    """What an actor sends and is sent; its native form is made once, too."""

    outboxes: Sequence[Sequence[Transmission]] = ()
    inboxes: Sequence[Sequence[int]] = ()  # by message: the actor that sends it

    @cached_property
    def native(self) -> _planner.Boxes:
        messages = [len(inbox) for inbox in self.inboxes]
        return _planner.Boxes(outboxes=self.outboxes, messages=messages)


@dataclass(frozen=True, kw_only=True)
class Actor:
    """A replica's table of ops; each names a slot of `seconds`, or one of its boxes."""

    ops: Ops
    seconds: list[float]
    boxes: Boxes = Boxes()  # it does not change
    begin_s: float = 0.0


@dataclass(frozen=True)
class Noise:
    """A log-normal factor of mean 1 by which each work's seconds are multiplied."""

    sigma: float
    seed: int


@dataclass
class Timing:
    """When each op of each actor began and ended, in seconds, and what the actors waited for."""

    starts: list[list[float]]  # by actor and op
    ends: list[list[float]]
    message_s: list[float]  # by actor: waiting for messages that were under way


@dataclass(frozen=True)
class Stuck:
    """An actor that cannot go on, at which op, and who has to act first."""

    actor: int
    op: int
    waits_for: tuple[int, ...]


class StuckError(RuntimeError):
    def __init__(self, stuck: list[Stuck]) -> None:
        super().__init__(f"{len(stuck)} actors cannot go on")
        self.stuck = stuck


def play(
    actors: list[Actor],
    slack: int | None = None,
    noise: Noise | None = None,
    hold: bool = False,
) -> Timing:
    """Plays the actors' tables. Raises StuckError when they cannot finish.

    slack: how many sends of an outbox may wait for their receives before the sender waits too.
    hold: a send holds its actor until its messages have arrived.
    """
    native = [
        _planner.Actor(
            ops=actor.ops.native,
            seconds=actor.seconds,
            factors=_factors(noise, a, actor),
            boxes=actor.boxes.native,
            begin_s=actor.begin_s,
        )
        for a, actor in enumerate(actors)
    ]
    played = _planner.play(native, slack, hold)
    following, blocked = played.next, played.blocked
    stuck = [a for a, actor in enumerate(actors) if following[a] < len(actor.ops.table)]
    if stuck:
        senders = {
            a: tuple(blocked[a]) if a in blocked else _late_senders(actors, following, a)
            for a in stuck
        }
        raise StuckError([Stuck(a, following[a], senders[a]) for a in stuck])
    return Timing(played.starts, played.ends, played.message_s)


def _late_senders(actors: list[Actor], following: list[int], a: int) -> tuple[int, ...]:
    """Returns the actors that have yet to send what an actor waits for in a receive.

    following: the next op of each actor.
    """
    _, inbox, micro_batch = actors[a].ops.table[following[a]]
    senders = dict.fromkeys(actors[a].boxes.inboxes[inbox])
    return tuple(
        b
        for b in senders
        if any(
            code == SEND
            and number == micro_batch
            and any((d.receiver, d.inbox) == (a, inbox) for d in actors[b].boxes.outboxes[slot])
            for code, slot, number in actors[b].ops.table[following[b] :]
        )
    )


def _factors(noise: Noise | None, number: int, actor: Actor) -> list[float]:
    """Returns the factors of an actor's own works, which do not depend on what the others do."""
    if noise is None:
        return []
    generator = random.Random(f"{noise.seed} {number}")
    mean, sigma = -(noise.sigma**2) / 2, noise.sigma
    works = sum(code == WORK for code, _, _ in actor.ops.table)
    return [math.exp(generator.gauss(mean, sigma)) for _ in range(works)]
