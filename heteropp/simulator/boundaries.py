"""The messages between two stages, by places in their replicas: whatever ranks these have."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from heteropp.description.plan import Replica, Resharding, Stage
from heteropp.layout.resharding import messages


class Way(NamedTuple):
    """One message of a replica."""

    number: int  # of the rows that it carries: which of the boundary tensor's boxes, in their order
    receiver: int  # replica
    source: int  # which of the sender's ranks
    destination: int  # which of the receiver's
    rows: int
    turn: int  # which of the sender's micro-batches, where a common multiple of unlike ones is sent
    into: int  # which of the receiver's


class Boundary(NamedTuple):
    """All messages from one stage to another that carry one common multiple of micro-batches."""

    ways: tuple[tuple[Way, ...], ...]  # by replica of the sender, in the order of `number`
    receivers: tuple[tuple[int, ...], ...]  # by replica of the sender: whom it sends to, ascending
    alike: tuple[int, ...]  # by replica: the first one whose ways differ in receivers' numbers only


class _Cut(NamedTuple):
    """What the messages of a stage depend on."""

    tp: int
    sequence_parallel: bool
    replicas: tuple[tuple[int, tuple[int, ...] | None], ...]  # batch share and token shares of each

    def stage(self, first_rank: int) -> Stage:
        size = self.tp * len(self.replicas[0][1] or (1,))
        return Stage(
            layers=(0, 1),
            recompute=False,
            sequence_parallel=self.sequence_parallel,
            replicas=tuple(
                Replica(
                    ranks=tuple(range(first_rank + r * size, first_rank + (r + 1) * size)),
                    chip="",
                    batch_share=batch_share,
                    token_shares=token_shares,
                )
                for r, (batch_share, token_shares) in enumerate(self.replicas)
            ),
        )


def boundary(
    sender: Stage, receiver: Stage, sequence_length: int, strategy: Resharding
) -> Boundary:
    """Returns the messages from one stage to another, of which no rank is in both."""
    return _boundary(_cut(sender), _cut(receiver), sequence_length, strategy)


def _cut(stage: Stage) -> _Cut:
    replicas = tuple((r.batch_share, r.token_shares) for r in stage.replicas)
    return _Cut(stage.tp, stage.sequence_parallel, replicas)


@lru_cache(maxsize=256)
def _boundary(
    sender_cut: _Cut, receiver_cut: _Cut, sequence_length: int, strategy: Resharding
) -> Boundary:
    sender = sender_cut.stage(0)
    receiver = receiver_cut.stage(sum(len(replica.ranks) for replica in sender.replicas))
    place = {
        rank: (r, i)
        for stage in (sender, receiver)
        for r, replica in enumerate(stage.replicas)
        for i, rank in enumerate(replica.ranks)
    }
    ways: list[list[Way]] = [[] for _ in sender.replicas]
    boxes: dict[object, int] = {}
    for message in messages(sender, receiver, sequence_length, strategy):
        (s, source), (r, destination) = place[message.source], place[message.destination]
        sequence = message.box.ranges[0][0] // sequence_length
        number = boxes.setdefault(message.box, len(boxes))
        turn, into = sequence // sender.micro_batch, sequence // receiver.micro_batch
        rows = message.box.shape[0]
        ways[s].append(Way(number, r, source, destination, rows, turn, into))
    receivers = [tuple(sorted({way.receiver for way in own})) for own in ways]
    first: dict[object, int] = {}
    alike = [
        first.setdefault(_pattern(own, to), s)
        for s, (own, to) in enumerate(zip(ways, receivers, strict=True))
    ]
    return Boundary(tuple(map(tuple, ways)), tuple(receivers), tuple(alike))


def _pattern(ways: list[Way], receivers: tuple[int, ...]) -> tuple[Way, ...]:
    """Returns ways with boxes and receivers numbered from 0 in their order, so that equal patterns
    differ in these numbers only.
    """
    numbers = {number: i for i, number in enumerate(sorted({way.number for way in ways}))}
    return tuple(
        way._replace(number=numbers[way.number], receiver=receivers.index(way.receiver))
        for way in ways
    )
