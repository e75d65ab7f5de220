"""Resharding between unlike stages: send/recv, then all-gather (section 5, figure 10).

The tensor at a stage boundary is [rows, hidden] for one micro-batch, rows = sequences x
sequence length in global order. A replica holds the rows of its batch share; each of its ranks
holds a copy. Every rank of a receiving replica is sent its own 1/tp of the replica's rows, so
each byte crosses the boundary once; the replica then gathers.

A sequence-parallel stage holds, and wants, of its replicas' rows one piece on each rank: nothing is
gathered there, whatever the strategy.

Rows are told as boxes, not as annotations: in a common multiple of unlike micro-batches a rank
holds several boxes, and an annotation gives it one.

Two other strategies are there to compare with. "broadcast": the first rank of a replica is sent
all its rows, and passes them on. "direct": every rank is sent all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import lcm
from typing import TYPE_CHECKING

from heteropp.layout.boxes import Box, split
from heteropp.layout.hspmd.routing import HeldBox, Wanted, alike, route

if TYPE_CHECKING:
    from heteropp.description.plan import Resharding, Stage

SENDS_UNDER_WAY = 2  # boundary tensors on their way to one neighbour, at most


@dataclass(frozen=True)
class Message:
    source: int  # rank
    destination: int  # rank
    box: Box  # rows of the boundary tensor of a micro-batch


def common_multiple(one: Stage, other: Stage) -> tuple[Stage, Stage]:
    """Two stages as if they took a common multiple of their micro-batches at once.

    What a replica does with one micro-batch after another, as many replicas then do.
    """
    rows = lcm(one.micro_batch, other.micro_batch)
    first, second = (
        replace(stage, replicas=stage.replicas * (rows // stage.micro_batch))
        for stage in (one, other)
    )
    return first, second


def replica_box(stage: Stage, replica: int, sequence_length: int) -> Box:
    """The rows of a micro-batch that a replica holds."""
    first, last = stage.shares[replica]
    return Box(((first * sequence_length, last * sequence_length),))


def piece_box(stage: Stage, replica: int, tp_index: int, sequence_length: int) -> Box:
    """The rows that one rank of a receiving replica is sent, before the all-gather."""
    return split(replica_box(stage, replica, sequence_length), 0, stage.tp, tp_index)


def held_box(stage: Stage, replica: int, tp_index: int, sequence_length: int) -> Box:
    """The rows that one rank holds, of what its stage works on or gives."""
    if stage.sequence_parallel:
        return piece_box(stage, replica, tp_index, sequence_length)
    return replica_box(stage, replica, sequence_length)


def received_box(
    stage: Stage, replica: int, tp_index: int, sequence_length: int, strategy: Resharding
) -> Box | None:
    """The rows that one rank of a receiving replica is sent; None: it waits for the broadcast."""
    if strategy == "all-gather" or stage.sequence_parallel:
        return piece_box(stage, replica, tp_index, sequence_length)
    if strategy == "broadcast" and tp_index > 0:
        return None
    return replica_box(stage, replica, sequence_length)


def messages(
    sender: Stage, receiver: Stage, sequence_length: int, strategy: Resharding = "all-gather"
) -> list[Message]:
    """All messages that carry one micro-batch's boundary tensor from one stage to the next.

    Where the stages' micro-batches differ in size, they carry a common multiple of them, and the
    boxes are rows of that; no message crosses a micro-batch of either side.

    The resolver chooses the sender: of the ranks that hold the same rows, the one that has the
    least to send. A rank whose own piece shares rows with the wanted piece counts as faster: its
    place in its node is the receiver's place there, and so is its NIC's.
    """
    both = (replica for stage in (sender, receiver) for replica in stage.replicas)
    number = {rank: i for i, rank in enumerate(dict.fromkeys(r for x in both for r in x.ranks))}
    ranks = list(number)
    found = [
        Message(ranks[message.source], ranks[message.destination], message.box)
        for message in _messages(
            _bare(sender, number), _bare(receiver, number), sequence_length, strategy
        )
    ]
    return sorted(found, key=lambda message: (message.box, message.destination))


def _bare(stage: Stage, number: Mapping[int, int]) -> Stage:
    """Returns a stage with only that which its messages depend on, and with other ranks."""
    replicas = tuple(
        replace(replica, ranks=tuple(number[rank] for rank in replica.ranks), chip="")
        for replica in stage.replicas
    )
    return replace(
        stage,
        layers=(0, 1), recompute=False, ministages=1, slack=0, offload=False, replicas=replicas,
    )  # fmt: skip


# a search moves layers between the same ranks again and again, and most boundaries of a plan differ
# in the numbers of their ranks alone
@lru_cache(maxsize=4096)
def _messages(
    sender: Stage, receiver: Stage, sequence_length: int, strategy: Resharding
) -> tuple[Message, ...]:
    sender, receiver = common_multiple(sender, receiver)
    held = _boxes(sender, lambda r, i: held_box(sender, r, i, sequence_length))
    pieces = _boxes(sender, lambda r, i: piece_box(sender, r, i, sequence_length))
    wanted = _boxes(receiver, lambda r, i: received_box(receiver, r, i, sequence_length, strategy))

    def bytes_per_s(source: int, destination: int) -> float:
        pairs = product(pieces[source], wanted[destination])
        return 2.0 if any(piece.intersect(box) for piece, box in pairs) else 1.0

    (round_,) = route(
        [HeldBox(0, rank, box) for rank, boxes in held.items() for box in boxes],
        [Wanted(0, rank, box) for rank, boxes in wanted.items() for box in boxes],
        [1],
        bytes_per_s if strategy == "all-gather" else alike,
    )
    return tuple(Message(t.senders[0], t.receiver, t.box) for t in round_)


def _boxes(stage: Stage, box_of: Callable[[int, int], Box | None]) -> dict[int, list[Box]]:
    """Returns the boxes of each rank; several, where replicas were repeated for a common multiple
    of micro-batches.
    """
    found: dict[int, list[Box]] = defaultdict(list)
    for r, replica in enumerate(stage.replicas):
        for i, rank in enumerate(replica.ranks):
            if box := box_of(r, i):
                found[rank].append(box)
    return found
