"""Plays tables of actions on given seconds, event by event.

An actor works through its table. A message leaves when it is sent and flows through its pipes at
once: it enters the next as soon as one begins to serve it. Each pipe serves messages one after
another, first come, first served, at its whole bandwidth. Sends do not hold the
sender, unless they are to (`hold`: until their messages have arrived), or unless only so many may
be unmatched (`slack`), as with a transport that buffers nothing.

Actors run ahead on their own; only sends, which compete for pipes, go through one queue of
events in the order of time. With `slack` receives do too.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, NamedTuple

WORK, SEND, RECV, MARK = range(4)  # MARK takes no time
Op = tuple[int, int, int]  # one of the four, its slot, and the micro-batch of a message
Key = int  # of a receive at its actor: inbox x micro-batches + micro-batch


class Transmission(NamedTuple):
    """One message that a send makes."""

    receiver: int  # actor
    inbox: int  # of the receiver
    latency_s: float
    pipes: tuple[tuple[int, float], ...]  # each with the seconds that the message fills it


@dataclass(frozen=True, kw_only=True)
class Actor:
    """A replica's table of ops; each names a slot of `seconds`, `outboxes` or `inboxes`."""

    ops: list[Op]
    seconds: list[float]
    outboxes: list[list[Transmission]] = field(default_factory=list)
    inboxes: list[list[int]] = field(default_factory=list)  # by message: the actor that sends it
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

    def renumbered(self, numbers: list[int]) -> StuckError:
        """Returns the same error with actor `a` named `numbers[a]`."""
        return StuckError(
            [
                Stuck(numbers[s.actor], s.op, tuple(numbers[b] for b in s.waits_for))
                for s in self.stuck
            ]
        )


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
    engine = _Engine(actors, slack, noise, hold)
    engine.go()
    return engine.timing


@dataclass(slots=True)
class _Flight:
    """A message under way."""

    delivery: Transmission
    micro_batch: int
    sender: int | None  # whom it holds
    sent_s: float
    end_s: float  # when the pipes it has entered have let it pass
    hop: int = 0  # the pipe to enter next


class _Engine:
    def __init__(
        self, actors: list[Actor], slack: int | None, noise: Noise | None, hold: bool
    ) -> None:
        count = len(actors)
        self.actors, self.slack, self.hold = actors, slack, hold
        self.micro_batches = 1 + max((op[2] for actor in actors for op in actor.ops), default=0)
        self.factors = [_factors(noise, a) for a in range(count)]
        self.clock = [actor.begin_s for actor in actors]
        self.next = [0] * count
        self.timing = Timing([[] for _ in actors], [[] for _ in actors], [0.0] * count)
        self.runnable = deque(range(count))
        # when, a number that keeps equal times in order, and what is to be called
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.event_count = 0
        self.now = -math.inf  # of the last event
        pipes = {p for x in actors for box in x.outboxes for d in box for p, _ in d.pipes}
        self.pipe_free_s = [0.0] * (max(pipes, default=-1) + 1)
        # by actor and key: messages still to come, the last one's arrival, and when it was sent
        count_of = self.micro_batches
        self.left = [[len(box) for box in x.inboxes for _ in range(count_of)] for x in actors]
        self.arrival_s = [[0.0] * len(left) for left in self.left]
        self.sent_s = [[0.0] * len(left) for left in self.left]
        self.awaited: list[Key | None] = [None] * count
        self.held: dict[int, list[Any]] = {}  # senders: messages under way, the latest arrival
        # with slack: receives that are posted, and the sends that wait for theirs
        self.posted: list[set[Key]] = [set() for _ in actors]
        self.unmatched: list[dict[Key, list[tuple[int, int, Transmission]]]] = [
            defaultdict(list) for _ in actors
        ]
        self.outstanding: dict[tuple[int, int], list[int]] = defaultdict(list)  # receivers
        self.blocked: dict[int, int] = {}  # actors that wait in a send, with the outbox

    def go(self) -> None:
        events, runnable = self.events, self.runnable
        while runnable or events:
            while runnable:
                self._advance(runnable.popleft())
            if events:
                self.now, _, call, arguments = heappop(events)
                call(*arguments)
        stuck = [a for a, actor in enumerate(self.actors) if self.next[a] < len(actor.ops)]
        if stuck:
            raise StuckError([Stuck(a, self.next[a], self._waits_for(a)) for a in stuck])

    def _advance(self, a: int) -> None:
        """Runs an actor's ops until one has to wait."""
        actor, now, i = self.actors[a], self.clock[a], self.next[a]
        ops, seconds, factor = actor.ops, actor.seconds, self.factors[a]
        starts, ends, micro_batches = self.timing.starts[a], self.timing.ends[a], self.micro_batches
        in_time = self.slack is not None  # who waits for whom depends on what is known when
        while i < len(ops):
            code, slot, micro_batch = ops[i]
            if in_time and now > self.now and code in (SEND, RECV):
                self._at(now, self.runnable.append, a)
                break
            end: float | None = now
            if code == WORK:
                end = now + (seconds[slot] if factor is None else seconds[slot] * factor())
            elif code == RECV:
                end = self._receive(a, slot * micro_batches + micro_batch, now)
            elif code == SEND:
                if self.slack is None:
                    sender = a if self.hold else None
                    self._at(now, self._send, actor.outboxes[slot], micro_batch, sender)
                    end = None if self.hold and actor.outboxes[slot] else now
                else:
                    end = self._offer(a, slot, micro_batch, now)
            if end is None:
                break
            starts.append(now)
            ends.append(end)
            now = end
            i += 1
        self.clock[a], self.next[a] = now, i

    def _complete(self, a: int, end_s: float) -> None:
        """Ends the op that an actor waits in."""
        self.timing.starts[a].append(self.clock[a])
        self.timing.ends[a].append(end_s)
        self.clock[a] = end_s
        self.next[a] += 1
        self.runnable.append(a)

    def _at(self, time_s: float, call: Callable[..., None], *arguments: Any) -> None:
        self.event_count += 1
        heappush(self.events, (time_s, self.event_count, call, arguments))

    def _send(self, deliveries: list[Transmission], micro_batch: int, sender: int | None) -> None:
        """Sends a micro-batch's messages. sender: the actor that waits until all have arrived."""
        if sender is not None:
            self.held[sender] = [len(deliveries), self.now]
        for delivery in deliveries:
            self._fly(_Flight(delivery, micro_batch, sender, self.now, self.now))

    def _fly(self, flight: _Flight) -> None:
        """Moves a message into its pipes up to the first busy one, and on once that serves it."""
        now, free_s, pipes, hop = self.now, self.pipe_free_s, flight.delivery.pipes, flight.hop
        while hop < len(pipes):
            pipe, seconds = pipes[hop]
            begin = free_s[pipe]
            if begin < now:
                begin = now
            free_s[pipe] = until = begin + seconds
            if until > flight.end_s:
                flight.end_s = until
            hop += 1
            if begin > now and hop < len(pipes):
                flight.hop = hop
                self._at(begin, self._fly, flight)
                return
        self._arrive(flight)

    def _arrive(self, flight: _Flight) -> None:
        a, inbox, latency_s, _ = flight.delivery
        end_s = flight.end_s + latency_s
        key = inbox * self.micro_batches + flight.micro_batch
        if end_s >= self.arrival_s[a][key]:
            self.arrival_s[a][key], self.sent_s[a][key] = end_s, flight.sent_s
        self.left[a][key] -= 1
        if self.awaited[a] == key and not self.left[a][key]:
            self.awaited[a] = None
            self.runnable.append(a)
        if flight.sender is not None:
            held = self.held[flight.sender]
            held[0] -= 1
            held[1] = max(held[1], end_s)
            if not held[0]:
                self._complete(flight.sender, held[1])

    def _receive(self, a: int, key: Key, now: float) -> float | None:
        if self.slack is not None and key not in self.posted[a]:
            self._post(a, key, now)
        if self.left[a][key]:
            self.awaited[a] = key
            return None
        arrival_s = self.arrival_s[a][key]
        if arrival_s <= now:
            return now
        self.timing.message_s[a] += arrival_s - max(now, self.sent_s[a][key])
        return arrival_s

    def _offer(self, a: int, outbox: int, micro_batch: int, now: float) -> float | None:
        """Sends the messages whose receives are posted; the others wait for theirs.

        Returns when the send ends, or None where too many wait and the sender does too.
        """
        for delivery in self.actors[a].outboxes[outbox]:
            key = delivery.inbox * self.micro_batches + micro_batch
            if key in self.posted[delivery.receiver]:
                self._at(now, self._send, [delivery], micro_batch, None)
            else:
                self.unmatched[delivery.receiver][key].append((a, outbox, delivery))
                self.outstanding[a, outbox].append(delivery.receiver)
        if not self._too_many(a, outbox):
            return now
        self.blocked[a] = outbox
        return None

    def _post(self, a: int, key: Key, now: float) -> None:
        self.posted[a].add(key)
        for sender, outbox, delivery in self.unmatched[a].pop(key, ()):
            self._at(now, self._send, [delivery], key % self.micro_batches, None)
            self.outstanding[sender, outbox].remove(a)
            if self.blocked.get(sender) == outbox and not self._too_many(sender, outbox):
                del self.blocked[sender]
                self._complete(sender, now)

    def _too_many(self, a: int, outbox: int) -> bool:
        assert self.slack is not None
        peers = len(self.actors[a].outboxes[outbox])
        return len(self.outstanding[a, outbox]) > self.slack * peers

    def _waits_for(self, a: int) -> tuple[int, ...]:
        if a in self.blocked:
            return tuple(self.outstanding[a, self.blocked[a]])
        _, inbox, micro_batch = self.actors[a].ops[self.next[a]]
        senders = dict.fromkeys(self.actors[a].inboxes[inbox])
        return tuple(b for b in senders if self._will_send(b, a, inbox, micro_batch))

    def _will_send(self, b: int, a: int, inbox: int, micro_batch: int) -> bool:
        return any(
            code == SEND
            and number == micro_batch
            and any((d.receiver, d.inbox) == (a, inbox) for d in self.actors[b].outboxes[slot])
            for code, slot, number in self.actors[b].ops[self.next[b] :]
        )


def _factors(noise: Noise | None, actor: int) -> Callable[[], float] | None:
    """Returns the actor's own random factors, which do not depend on what the others do."""
    if noise is None:
        return None
    generator = random.Random(f"{noise.seed} {actor}")
    mean, sigma = -(noise.sigma**2) / 2, noise.sigma
    return lambda: math.exp(generator.gauss(mean, sigma))
