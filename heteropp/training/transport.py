"""How ranks reach each other: process groups and boundary messages over torch.distributed.

On chips the backend is dicomm and the device ditorch's; on the host alone it is gloo and the CPU.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from heteropp.plan import Plan, Stage
from heteropp.reshard import SENDS_UNDER_WAY, messages, piece_box, replica_box
from heteropp.training.tp import ProcessGroup, SoloGroup, TensorParallelGroup


@dataclass(frozen=True)
class Place:
    """Where a rank stands in a plan of one pipeline."""

    rank: int
    stage_index: int
    replica_index: int
    tp_index: int
    stage: Stage
    previous: Stage | None
    following: Stage | None

    @staticmethod
    def of(plan: Plan, rank: int) -> Place:
        pipeline, stage, replica, tp_index = plan.place(rank)
        stages = plan.pipelines[pipeline].stages
        return Place(
            rank,
            stage,
            replica,
            tp_index,
            stages[stage],
            stages[stage - 1] if stage else None,
            stages[stage + 1] if stage + 1 < len(stages) else None,
        )


class Groups:
    """The process groups a rank belongs to. Every rank of the plan must build them."""

    def __init__(self, place: Place) -> None:
        ranks = place.stage.replicas[place.replica_index].ranks
        self.tensor_parallel: TensorParallelGroup = (
            SoloGroup() if len(ranks) == 1 else ProcessGroup(_new_group(ranks))
        )
        # the ranks that hold the same slices: one of each replica
        peers = tuple(replica.ranks[place.tp_index] for replica in place.stage.replicas)
        self.data_parallel = None if len(peers) == 1 else _new_group(peers)

    def every(self) -> list[dist.ProcessGroup]:
        """All of them, the world's first."""
        world = dist.group.WORLD
        assert world is not None
        groups = [world]
        if isinstance(self.tensor_parallel, ProcessGroup):
            groups.append(self.tensor_parallel.group)
        if self.data_parallel is not None:
            groups.append(self.data_parallel)
        return groups


def _new_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    return dist.new_group(list(ranks), use_local_synchronization=True)


def connect(
    store: dist.Store, rank: int, world_size: int, backend: str, timeout_s: float = 300
) -> None:
    """Joins the job's world group; raises what torch.distributed raises when a peer is missing."""
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("heteropp", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


@dataclass(frozen=True)
class Part:
    """One message of a boundary tensor: the peer, and its rows of the tensor held here."""

    peer: int
    rows: slice


class Inbox:
    """The boundary tensors that come from one neighbour, one a micro-batch, in order.

    The receive of the next micro-batch is posted before this one is waited for, never more.
    """

    def __init__(
        self,
        place: Place,
        sender: Stage,
        sequence_length: int,
        hidden: int,
        tag: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        held = piece_box(place.stage, place.replica_index, place.tp_index, sequence_length)
        self.parts = [
            Part(message.source, message.box.within(held)[0])
            for message in messages(sender, place.stage, sequence_length)
            if message.destination == place.rank
        ]
        self.shape = (*held.shape, hidden)
        self.tag, self.device, self.dtype = tag, device, dtype
        self.posted: deque[tuple[Tensor, list[dist.Work]]] = deque()
        self.left = 0

    def begin(self, micro_batches: int) -> None:
        """Starts a step in which this many tensors come."""
        assert not self.posted
        self.left = micro_batches
        self._post()

    def take(self) -> Tensor:
        """Waits for the next piece, [rows / tp, hidden]."""
        piece, works = self.posted.popleft()
        self._post()
        for work in works:
            work.wait()
        return piece

    def _post(self) -> None:
        if not self.left:
            return
        self.left -= 1
        piece = torch.empty(self.shape, device=self.device, dtype=self.dtype)
        works = []
        for part in self.parts:
            work = dist.irecv(piece[part.rows], part.peer, tag=self.tag)
            assert work is not None
            works.append(work)
        self.posted.append((piece, works))


class Outbox:
    """The boundary tensors that go to one neighbour; each is held until its peers have it.

    At most SENDS_UNDER_WAY are: the host, which runs ahead of its chip, would hold more and more.
    """

    def __init__(self, place: Place, receiver: Stage, sequence_length: int, tag: int) -> None:
        held = replica_box(place.stage, place.replica_index, sequence_length)
        self.parts = [
            Part(message.destination, message.box.within(held)[0])
            for message in messages(place.stage, receiver, sequence_length)
            if message.source == place.rank
        ]
        self.tag = tag
        self.under_way: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, tensor: Tensor) -> None:
        """Starts sending a [rows, hidden] tensor, which must not change until it has left."""
        most = (SENDS_UNDER_WAY - 1) * len(self.parts)
        while len(self.under_way) > most or (
            self.under_way and self.under_way[0][0].is_completed()
        ):
            self._finish()
        for part in self.parts:
            work = dist.isend(tensor[part.rows], part.peer, tag=self.tag)
            assert work is not None
            self.under_way.append((work, tensor))

    def finish(self) -> None:
        """Waits until everything has left."""
        while self.under_way:
            self._finish()

    def _finish(self) -> None:
        work, _ = self.under_way.popleft()
        work.wait()
