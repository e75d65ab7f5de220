"""An auxiliary loss over stages: totals of routers go with activations, and what the loss asks of
routers comes back with gradients.

Each sequence counts by itself, so that no plan changes the loss: a step's is the mean, over the
tokens that count, of transformers' loss of each sequence alone. What goes from stage to stage is
two numbers of each sequence for every expert, and one back, which all ranks of a replica have
alike: so little beside activations that predictions leave it out.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from heteropp.description.plan import Plan, Stage
from heteropp.models.auxiliary_loss import AuxiliaryLoss, Routing
from heteropp.models.parallel.context_parallel import ContextParallelGroup, ContextProcessGroup
from heteropp.runtime.ranks.transport import Coordinates
from heteropp.runtime.step.boundary import Inbox, Outbox
from heteropp.schedule.action import Kind

FIRST_TAG = 1 << 15  # above those of boundary tensors


class AuxiliaryPasses:
    """A rank's part in the auxiliary loss of its micro-batches."""

    def __init__(
        self,
        plan: Plan,
        place: Coordinates,
        context: ContextParallelGroup | None,
        loss: AuxiliaryLoss,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """dtype: of totals."""
        self.loss, self.device, self.dtype = loss, device, dtype
        self.context = context.group if isinstance(context, ContextProcessGroup) else None
        self.is_counted = place.cp_index == 0  # of ranks with parts of the same sequences
        replica = place.stage.replicas[place.replica_index]
        self.sequences = replica.batch_share
        # of a micro-batch's slices that have come to the end: routing, totals, and counted tokens
        self.slices, self.ended = place.pipeline.slices, list[tuple[Routing, Tensor, Tensor]]()
        self.plan = replace(plan, resharding="direct")
        stages = tuple(_uncut(stage) for stage in place.pipeline.stages)
        self.place = replace(
            place,
            pipeline=replace(place.pipeline, stages=stages),
            tp_index=replica.ranks.index(place.rank),
            cp_index=0,
        )
        self.inboxes: dict[tuple[Kind, int], Inbox] = {}
        self.outboxes: dict[tuple[Kind, int], Outbox] = {}

    def connect(
        self, k: int, neighbour: Stage, receive: Kind, send: Kind, tags: tuple[int, int]
    ) -> None:
        """Makes the boxes of a ministage that stand beside those of its boundary tensors."""
        given = self.plan, self.place, _uncut(neighbour), (1,)
        width = self.loss.experts * (2 if receive == Kind.RECV_ACTIVATION else 1)
        self.inboxes[receive, k] = Inbox(
            *given, FIRST_TAG + tags[0], self.device, self.dtype, width
        )
        self.outboxes[send, k] = Outbox(*given, FIRST_TAG + tags[1])

    def take(self, kind: Kind, k: int) -> Tensor:
        """Waits for what comes with the next boundary tensor: [sequences, 2, experts] with
        activations, and [sequences, experts] with gradients.
        """
        found = self.inboxes[kind, k].take()
        return found.view(-1, 2, self.loss.experts) if kind == Kind.RECV_ACTIVATION else found

    def send(self, kind: Kind, k: int, tensor: Tensor | None) -> None:
        assert tensor is not None
        self.outboxes[kind, k].send(tensor.flatten(1))

    def totals(self, routing: Routing, earlier: Tensor | None) -> Tensor:
        """Ends a forward: returns the totals of its layers and of those before."""
        routing.counts = False
        if self.context is not None:
            dist.all_reduce(routing.totals, group=self.context)
        return routing.totals if earlier is None else routing.totals + earlier

    def ask(
        self, routing: Routing, totals: Tensor, targets: Tensor, counted: int, loss_scale: float
    ) -> Tensor:
        """Returns this rank's part of the step's loss, and notes what that asks of routers.

        A sequence's loss counts as often as its tokens do. Where slices run, their last one ends
        in the loss of all, before the first of their backwards. totals: of all layers.
        """
        tokens = (targets.view(self.sequences, -1) >= 0).sum(1).to(totals.dtype)
        if self.context is not None:
            dist.all_reduce(tokens, group=self.context)
        self.ended.append((routing, totals, tokens))
        if len(self.ended) < self.slices:
            return tokens.new_zeros(())
        routings, every, counts = zip(*self.ended, strict=True)
        self.ended.clear()
        totals, part = torch.stack(every).sum(0), torch.stack(counts).sum(0) / max(1, counted)
        for each in routings:
            each.gradients = (loss_scale * part).unsqueeze(1) * self.loss.gradients(totals)
        loss = (part * self.loss.of(totals)).sum()
        return loss if self.is_counted else torch.zeros_like(loss)


def _uncut(stage: Stage) -> Stage:
    """Returns a stage as if each rank of a replica had all of its sequences' tokens."""
    replicas = tuple(
        replace(replica, token_shares=None, group_chips=None) for replica in stage.replicas
    )
    return replace(
        stage, replicas=replicas, sequence_parallel=False, expert_shares=None, expert_capacity=None
    )
