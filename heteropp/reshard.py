"""Resharding between unlike stages: send/recv, then all-gather (section 5, figure 10).

The tensor at a stage boundary is [rows, hidden] for one micro-batch, rows = sequences x
sequence length in global order. A replica holds the rows of its batch share; each of its ranks
holds a copy. Every rank of a receiving replica is sent its own 1/tp of the replica's rows, so
each byte crosses the boundary once; the replica then gathers.
"""

from __future__ import annotations

from dataclasses import dataclass

from heteropp.boxes import Box, split
from heteropp.plan import Stage

SENDS_UNDER_WAY = 2  # boundary tensors on their way to one neighbour, at most


@dataclass(frozen=True)
class Message:
    source: int  # rank
    destination: int  # rank
    box: Box  # rows of the micro-batch's boundary tensor


def replica_box(stage: Stage, replica: int, sequence_length: int) -> Box:
    """The rows of a micro-batch that a replica holds."""
    shares = [r.batch_share for r in stage.replicas]
    first = sum(shares[:replica])
    return Box(((first * sequence_length, (first + shares[replica]) * sequence_length),))


def piece_box(stage: Stage, replica: int, tp_index: int, sequence_length: int) -> Box:
    """The rows that one rank of a receiving replica is sent, before the all-gather."""
    return split(replica_box(stage, replica, sequence_length), 0, stage.tp, tp_index)


def messages(sender: Stage, receiver: Stage, sequence_length: int) -> list[Message]:
    """All messages that carry one micro-batch's boundary tensor from one stage to the next.

    The source within a sending replica is chosen so that its ranks take turns by row order:
    with tp 4 to tp 2, ranks 0 and 2 send; with tp 2 to tp 4, each sends two pieces.
    """
    result = []
    for r, replica in enumerate(receiver.replicas):
        for tp_index, destination in enumerate(replica.ranks):
            piece = piece_box(receiver, r, tp_index, sequence_length)
            for s, sending in enumerate(sender.replicas):
                held = replica_box(sender, s, sequence_length)
                common = held.intersect(piece)
                if common is None:
                    continue
                first, (held_first, held_last) = common.ranges[0][0], held.ranges[0]
                offset = (first - held_first) * len(sending.ranks) // (held_last - held_first)
                result.append(Message(sending.ranks[offset], destination, common))
    return result
