"""Replicas that do the same at the same times are played once.

Messages of one send that go the same way, each over pipes of its own, count as one: the pipes
are twins. And of parts of a plan that nothing joins and that are alike in everything, such as
replicas with their own NICs, one is played for all. Neither changes any time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, replace

from heteropp.simulator.engine import Actor, Noise, StuckError, Timing, Transmission, play


def play_folded(
    actors: list[Actor], slack: int | None, noise: Noise | None, hold: bool = False
) -> Timing:
    """Returns what `play` does for all actors; those that do the same share their lists.

    Raises StuckError with numbers of `actors`.
    """
    if noise is not None:
        return play(actors, slack, noise, hold)
    actors = _without_twins(actors)
    parts = _parts(actors)
    first: dict[Hashable, list[int]] = {}
    stands_for: list[tuple[list[int], list[int]]] = []  # a part, and the one played for it
    for part in parts:
        stands_for.append((part, first.setdefault(_signature(actors, part), part)))
    chosen = [a for part in first.values() for a in part]
    number = {a: i for i, a in enumerate(chosen)}
    try:
        played = play([_renumbered(actors[a], number) for a in chosen], slack, None, hold)
    except StuckError as error:
        raise error.renumbered(chosen) from None
    timing = Timing([[] for _ in actors], [[] for _ in actors], [0.0] * len(actors))
    for part, model in stands_for:
        for a, b in zip(part, model, strict=True):
            timing.starts[a] = played.starts[number[b]]
            timing.ends[a] = played.ends[number[b]]
            timing.message_s[a] = played.message_s[number[b]]
    return timing


@dataclass(frozen=True)
class _Message:
    """A delivery, with what tells its pipes from others."""

    actor: int
    outbox: int
    delivery: Transmission
    pipes: tuple[int, ...]
    use: Hashable  # all but the pipes; its number in the send too, where that shares a pipe


def _without_twins(actors: list[Actor]) -> list[Actor]:
    """Leaves one of the messages of a send that differ in twin pipes only."""
    messages = _messages(actors)
    twin_of = _twins(messages)
    left: dict[tuple[int, int], dict[Hashable, Transmission]] = defaultdict(dict)
    for message in messages:
        pipes = tuple((twin_of[pipe], seconds) for pipe, seconds in message.delivery.pipes)
        merged = message.delivery._replace(pipes=pipes)
        left[message.actor, message.outbox][pipes, message.use] = merged
    senders: dict[tuple[int, int], list[int]] = defaultdict(list)
    for (a, _), deliveries in left.items():
        for delivery in deliveries.values():
            senders[delivery.receiver, delivery.inbox].append(a)
    return [
        replace(
            actor,
            outboxes=[list(left[a, slot].values()) for slot in range(len(actor.outboxes))],
            inboxes=[senders[a, slot] for slot in range(len(actor.inboxes))],
        )
        for a, actor in enumerate(actors)
    ]


def _messages(actors: list[Actor]) -> list[_Message]:
    messages = []
    for a, actor in enumerate(actors):
        for slot, outbox in enumerate(actor.outboxes):
            ways = [tuple(pipe for pipe, _ in delivery.pipes) for delivery in outbox]
            number = Counter(pipe for pipes in ways for pipe in pipes)
            for i, (delivery, pipes) in enumerate(zip(outbox, ways, strict=True)):
                receiver, inbox, latency_s, _ = delivery
                seconds = tuple(seconds for _, seconds in delivery.pipes)
                alone = i if any(number[pipe] > 1 for pipe in pipes) else -1
                use = (a, slot, receiver, inbox, latency_s, seconds, alone)
                messages.append(_Message(a, slot, delivery, pipes, use))
    return messages


def _twins(messages: list[_Message]) -> dict[int, int]:
    """Returns the first of each pipe's twins, by pipe.

    Twins are used by the same sends, for as long, next to pipes that are twins again, and none of
    them carries two messages of a send: so they are always busy at the same times.
    """
    width = max((len(message.pipes) for message in messages), default=0)
    places: dict[int, list[int]] = defaultdict(list)  # by pipe: the message, times width + position
    for m, message in enumerate(messages):
        for position, pipe in enumerate(message.pipes):
            places[pipe].append(m * width + position)
    numbers: dict[Hashable, int] = {}  # small ones for what is compared in every round
    uses = [numbers.setdefault(message.use, len(numbers)) for message in messages]
    kind = dict.fromkeys(places, 0)
    kinds = 0
    while True:
        ways: dict[Hashable, int] = {}
        way_of = [
            ways.setdefault((use, *[kind[pipe] for pipe in message.pipes]), len(ways))
            for use, message in zip(uses, messages, strict=True)
        ]
        placed = [way * width + position for way in way_of for position in range(width)]
        first: dict[Hashable, int] = {}
        kind = {
            pipe: first.setdefault(tuple([placed[i] for i in own]), pipe)
            for pipe, own in places.items()
        }
        if len(first) == kinds:
            return kind
        kinds = len(first)


def _parts(actors: list[Actor]) -> list[list[int]]:
    """Returns the sets of actors that messages or pipes join, directly or through others.

    The actors of a set are in ascending order.
    """
    parent = list(range(len(actors)))

    def root(a: int) -> int:
        while parent[a] != a:
            parent[a] = a = parent[parent[a]]
        return a

    user: dict[int, int] = {}
    for a, actor in enumerate(actors):
        for delivery in (d for outbox in actor.outboxes for d in outbox):
            for b in (delivery.receiver, *(user.setdefault(p, a) for p, _ in delivery.pipes)):
                one, other = sorted((root(a), root(b)))
                parent[other] = one
    parts: dict[int, list[int]] = defaultdict(list)
    for a in range(len(actors)):
        parts[root(a)].append(a)
    return list(parts.values())


def _signature(actors: list[Actor], part: list[int]) -> Hashable:
    """Returns a key, equal for parts that differ only in their actors' and pipes' numbers."""
    number = {a: i for i, a in enumerate(part)}
    pipe_number: dict[int, int] = {}
    return tuple(
        (
            id(actor.ops),  # replicas of a stage share their table
            tuple(actor.seconds),
            actor.begin_s,
            tuple(tuple(number[b] for b in inbox) for inbox in actor.inboxes),
            tuple(
                tuple(
                    (
                        number[d.receiver],
                        d.inbox,
                        d.latency_s,
                        tuple((pipe_number.setdefault(p, len(pipe_number)), s) for p, s in d.pipes),
                    )
                    for d in outbox
                )
                for outbox in actor.outboxes
            ),
        )
        for actor in (actors[a] for a in part)
    )


def _renumbered(actor: Actor, number: dict[int, int]) -> Actor:
    return replace(
        actor,
        outboxes=[
            [d._replace(receiver=number[d.receiver]) for d in outbox] for outbox in actor.outboxes
        ],
        inboxes=[[number[b] for b in inbox] for inbox in actor.inboxes],
    )
