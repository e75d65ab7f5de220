"""Messages that are always under way together count as one.

Messages of one send that go the same way, each over pipes of its own, are twins, as their pipes
are. Keeping only one of them changes no time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from heteropp.simulator.engine import Boxes, Transmission


@dataclass(frozen=True)
class _Message:
    """A delivery, with what tells its pipes from others."""

    actor: int
    outbox: int
    delivery: Transmission
    pipes: tuple[int, ...]
    use: Hashable  # all but the pipes; its number in the send too, where that shares a pipe


def without_twins(boxes: Sequence[Boxes]) -> list[Boxes]:
    """Keeps one of the messages of a send that differ in twin pipes only; of boxes by actor."""
    messages = _messages(boxes)
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
        Boxes(
            [list(left[a, slot].values()) for slot in range(len(own.outboxes))],
            [senders[a, slot] for slot in range(len(own.inboxes))],
        )
        for a, own in enumerate(boxes)
    ]


def _messages(boxes: Sequence[Boxes]) -> list[_Message]:
    messages = []
    for a, own in enumerate(boxes):
        for slot, outbox in enumerate(own.outboxes):
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
