"""Resharding between unlike stages: send/recv, then all-gather (section 5, figure 10).

The tensor at a stage boundary is [rows, hidden] for one micro-batch, rows = sequences x
sequence length in global order. A replica holds the rows of its batch share; each of its ranks
holds a copy. Every rank of a receiving replica is sent its own 1/tp of the replica's rows, so
each byte crosses the boundary once; the replica then gathers.

A sequence-parallel stage holds, and wants, of its replicas' rows one piece on each rank: nothing is
gathered there, whatever the strategy.

Two other strategies are there to compare with. "broadcast": the first rank of a replica is sent
all its rows, and passes them on. "direct": every rank is sent all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm

from heteropp.boxes import Box, split
from heteropp.hspmd.routing import Held, Wanted, route
from heteropp.plan import Resharding, Stage

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
    shares = [r.batch_share for r in stage.replicas]
    first = sum(shares[:replica])
    return Box(((first * sequence_length, (first + shares[replica]) * sequence_length),))


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

    Where the stages' micro-batches are unlike, of as many as make a common multiple, whose rows
    the boxes are of; no message crosses a micro-batch of either side.

    Who sends is the resolver's answer: of ranks that hold the same rows, the one that has the least
    to send. The strategy is what is wanted.
    """
    sender, receiver = common_multiple(sender, receiver)
    held = [
        Held(0, replica.ranks[i], held_box(sender, r, i, sequence_length))
        for r, replica in enumerate(sender.replicas)
        for i in _far_apart(len(replica.ranks))
    ]
    received = (
        (rank, received_box(receiver, r, i, sequence_length, strategy))
        for r, replica in enumerate(receiver.replicas)
        for i, rank in enumerate(replica.ranks)
    )
    wanted = [Wanted(0, rank, box) for rank, box in received if box is not None]
    (round_,) = route(held, wanted, [1])
    found = [Message(t.senders[0], t.receiver, t.box) for t in round_]
    return sorted(found, key=lambda message: (message.box, message.destination))


def _far_apart(ranks: int) -> list[int]:
    """So many ranks in an order of which any first few are far apart: they share no NIC."""
    digits = (ranks - 1).bit_length()
    return [i for i in (_reversed(n, digits) for n in range(1 << digits)) if i < ranks]


def _reversed(number: int, digits: int) -> int:
    return int(f"{number:0{digits}b}"[::-1], 2) if digits else 0
