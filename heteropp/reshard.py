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

    The source within a sending replica is chosen so that its ranks take turns by row order:
    with tp 4 to tp 2, ranks 0 and 2 send; with tp 2 to tp 4, each sends two pieces. Where whole
    rows go to every rank, they take turns by receiver.
    """
    sender, receiver = common_multiple(sender, receiver)
    result = []
    for r, replica in enumerate(receiver.replicas):
        for tp_index, destination in enumerate(replica.ranks):
            wanted = received_box(receiver, r, tp_index, sequence_length, strategy)
            if wanted is None:
                continue
            for s, sending in enumerate(sender.replicas):
                held = replica_box(sender, s, sequence_length)
                common = held.intersect(wanted)
                if common is None:
                    continue
                if sender.sequence_parallel:
                    result += _from_holders(sender, s, destination, common, sequence_length)
                    continue
                turn = tp_index % len(sending.ranks)
                if strategy == "all-gather":
                    first, (held_first, held_last) = common.ranges[0][0], held.ranges[0]
                    turn = (first - held_first) * len(sending.ranks) // (held_last - held_first)
                result.append(Message(sending.ranks[turn], destination, common))
    return result


def _from_holders(
    sender: Stage, replica: int, destination: int, wanted: Box, sequence_length: int
) -> list[Message]:
    """Of a sequence-parallel replica: each row from the one rank that holds it."""
    result = []
    for tp_index, source in enumerate(sender.replicas[replica].ranks):
        common = held_box(sender, replica, tp_index, sequence_length).intersect(wanted)
        if common is not None:
            result.append(Message(source, destination, common))
    return result
