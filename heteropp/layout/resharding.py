"""Resharding between unlike stages: send/recv, then all-gather (section 5, figure 10).

The tensor at a stage boundary is [rows, hidden] for one micro-batch, rows = sequences x
sequence length in global order. A replica holds the rows of its batch share; each of its ranks
holds a copy. Every rank of a receiving replica is sent its own 1/tp of the replica's rows, so
each byte crosses the boundary once; the replica then gathers. With context parallelism the same is
done by each of a replica's tensor-parallel groups, with its tokens of every sequence.

A sequence-parallel stage holds, and wants, of its replicas' rows one piece on each rank: nothing is
gathered there, whatever the strategy.

Rows are told as boxes, not as annotations: a rank holds several boxes, in a common multiple of
unlike micro-batches or with tokens of several sequences, and an annotation gives it one.

Two other strategies are there to compare with. "broadcast": the first rank of a group is sent
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


def group_boxes(stage: Stage, replica: int, cp_index: int, sequence_length: int) -> list[Box]:
    """The rows of a micro-batch that a tensor-parallel group works on, in its own order.

    They are one box, or with context parallelism one for each sequence.
    """
    first, last = stage.shares[replica]
    ranges = stage.replicas[replica].token_ranges
    if ranges is None:
        return [Box(((first * sequence_length, last * sequence_length),))]
    begin, end = ranges[cp_index]
    starts = (sequence * sequence_length for sequence in range(first, last))
    return [Box(((start + begin, start + end),)) for start in starts]


def piece_boxes(
    stage: Stage, replica: int, cp_index: int, tp_index: int, sequence_length: int
) -> list[Box]:
    """The rows that one rank of a receiving group is sent, before the all-gather."""
    boxes = group_boxes(stage, replica, cp_index, sequence_length)
    if len(boxes) == 1:
        return [split(boxes[0], 0, stage.tp, tp_index)]
    own = split(Box(((0, sum(box.size for box in boxes)),)), 0, stage.tp, tp_index)
    found, before = [], 0
    for box in boxes:
        if common := own.intersect(Box(((before, before + box.size),))):
            first, last = common.ranges[0]
            start = box.ranges[0][0] - before
            found.append(Box(((start + first, start + last),)))
        before += box.size
    return found


def held_boxes(
    stage: Stage, replica: int, cp_index: int, tp_index: int, sequence_length: int
) -> list[Box]:
    """The rows that one rank holds, of what its stage works on or gives."""
    if stage.sequence_parallel:
        return piece_boxes(stage, replica, cp_index, tp_index, sequence_length)
    return group_boxes(stage, replica, cp_index, sequence_length)


def received_boxes(
    stage: Stage,
    replica: int,
    cp_index: int,
    tp_index: int,
    sequence_length: int,
    strategy: Resharding,
) -> list[Box]:
    """The rows that one rank of a receiving group is sent; none: it waits for the broadcast."""
    if strategy == "all-gather" or stage.sequence_parallel:
        return piece_boxes(stage, replica, cp_index, tp_index, sequence_length)
    if strategy == "broadcast" and tp_index > 0:
        return []
    return group_boxes(stage, replica, cp_index, sequence_length)


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
        replace(
            replica,
            ranks=tuple(number[rank] for rank in replica.ranks),
            chip="",
            group_chips=None,
        )
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
    held = _boxes(sender, lambda r, c, i: held_boxes(sender, r, c, i, sequence_length))
    pieces = _boxes(sender, lambda r, c, i: piece_boxes(sender, r, c, i, sequence_length))
    wanted = _boxes(
        receiver, lambda r, c, i: received_boxes(receiver, r, c, i, sequence_length, strategy)
    )

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


def _boxes(stage: Stage, boxes_of: Callable[[int, int, int], list[Box]]) -> dict[int, list[Box]]:
    """Returns the boxes of each rank.

    boxes_of: takes a replica, and a rank's context- and tensor-parallel indices in it.
    """
    found: dict[int, list[Box]] = defaultdict(list)
    for r, replica in enumerate(stage.replicas):
        for i, rank in enumerate(replica.ranks):
            if boxes := boxes_of(r, i // stage.tp, i % stage.tp):
                found[rank] += boxes
    return found
