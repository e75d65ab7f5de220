"""Runs a stage's actions for real, as one rank of a tensor-parallel group (sections 4.2 and 5).

The actions are those the simulator runs. The host never waits for the device inside a step; it
reads the loss and the gradient norm back once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from heteropp.action import Action, Kind
from heteropp.hyperparameters import Hyperparameters
from heteropp.plan import Plan
from heteropp.schedule import actions
from heteropp.training.collective import all_gather
from heteropp.training.llama import StageModule, model_parameters
from heteropp.training.metrics import Clock, Mark
from heteropp.training.optimizer import clip
from heteropp.training.transport import Groups, Inbox, Outbox, Place
from heteropp.training.zero import FlatParameters

ACTIVATION_TAG, GRADIENT_TAG = 1, 2


@dataclass
class MicroBatch:
    """What a stage keeps of a micro-batch between its actions."""

    input: Tensor | None = None  # tokens or activations, [rows] or [rows, hidden]
    output: Tensor | None = None  # activations or the loss
    gradient: Tensor | None = None  # of the output, then of the input


@dataclass(frozen=True)
class StepResult:
    loss: float  # mean over the global batch's tokens
    gradient_norm: float  # before clipping
    marks: list[tuple[Action, Mark, Mark]]  # when each action began and ended


class Executor:
    def __init__(
        self,
        plan: Plan,
        place: Place,
        groups: Groups,
        module: StageModule,
        hyperparameters: Hyperparameters,
        clock: Clock,
    ) -> None:
        model, pipeline = plan.model, plan.pipelines[0]
        self.place, self.groups, self.module, self.clock = place, groups, module, clock
        self.hyperparameters = hyperparameters
        self.micro_batches = pipeline.micro_batches
        self.actions = actions(plan.schedule, pipeline, place.stage_index)
        self.flat = FlatParameters(module, groups.data_parallel, plan.zero_stage, hyperparameters)
        self.device, self.dtype = self.flat.values.device, self.flat.values.dtype
        self.tokens_per_step = plan.global_batch * model.sequence_length

        shape = (model.sequence_length, model.hidden)
        kind = (self.device, self.dtype)
        self.inboxes: dict[Kind, Inbox] = {}
        self.outboxes: dict[Kind, Outbox] = {}
        if place.previous:
            self.inboxes[Kind.RECV_ACTIVATION] = Inbox(
                place, place.previous, *shape, ACTIVATION_TAG, *kind
            )
            self.outboxes[Kind.SEND_GRADIENT] = Outbox(
                place, place.previous, shape[0], GRADIENT_TAG
            )
        if place.following:
            self.inboxes[Kind.RECV_GRADIENT] = Inbox(
                place, place.following, *shape, GRADIENT_TAG, *kind
            )
            self.outboxes[Kind.SEND_ACTIVATION] = Outbox(
                place, place.following, shape[0], ACTIVATION_TAG
            )

        parameters = [parameter.name for parameter in model_parameters(model)]
        self.first_parameter = parameters.index(self.flat.entries[0].name)
        self.parameter_count = len(parameters)
        self.work: dict[int, MicroBatch] = {}
        self.current: Action | None = None  # for whoever has to say what this rank was doing
        self.run: dict[Kind, Callable[[int], None]] = {
            Kind.RECV_ACTIVATION: self._receive_activation,
            Kind.GATHER_ACTIVATION: self._gather_activation,
            Kind.F: self._forward,
            Kind.SEND_ACTIVATION: self._send_activation,
            Kind.R: self._recompute,
            Kind.RECV_GRADIENT: self._receive_gradient,
            Kind.GATHER_GRADIENT: self._gather_gradient,
            Kind.B: self._backward,
            Kind.SEND_GRADIENT: self._send_gradient,
        }

    def submit(self, learning_rate: float, tokens: Tensor | None, targets: Tensor | None) -> None:
        """Starts one optimizer step; the host is back long before the device is.

        tokens and targets are [micro-batches, rows of this replica] int64 on the device; the
        first stage needs tokens, the last targets.
        """
        self.tokens, self.targets = tokens, targets
        self.loss = torch.zeros((), device=self.device, dtype=self.flat.gradients.dtype)
        self.work = {i: MicroBatch() for i in range(self.micro_batches)}
        self.marks: list[tuple[Action, Mark, Mark]] = []
        self.flat.zero_gradients()
        for inbox in self.inboxes.values():
            inbox.begin(self.micro_batches)
        for action in self.actions:
            self.current = action
            begin = self.clock.mark()
            if action.kind == Kind.REDUCE:
                self.flat.reduce()
            elif action.kind == Kind.STEP:
                self.outcome = self._update(learning_rate)
            else:
                assert action.micro_batch is not None
                self.run[action.kind](action.micro_batch)
            self.marks.append((action, begin, self.clock.mark()))

    def finish(self) -> StepResult:
        """Waits until the step is done."""
        for outbox in self.outboxes.values():
            outbox.finish()
        loss, norm = self.outcome.tolist()
        self.current = None
        return StepResult(loss, norm, self.marks)

    def _receive_activation(self, micro_batch: int) -> None:
        self.work[micro_batch].input = self.inboxes[Kind.RECV_ACTIVATION].take()

    def _gather_activation(self, micro_batch: int) -> None:
        self.work[micro_batch].input = self._gather(self.work[micro_batch].input)

    def _receive_gradient(self, micro_batch: int) -> None:
        self.work[micro_batch].gradient = self.inboxes[Kind.RECV_GRADIENT].take()

    def _gather_gradient(self, micro_batch: int) -> None:
        self.work[micro_batch].gradient = self._gather(self.work[micro_batch].gradient)

    def _gather(self, piece: Tensor | None) -> Tensor:
        assert piece is not None
        group = self.groups.tensor_parallel
        whole = piece.new_empty((piece.shape[0] * group.size, *piece.shape[1:]))
        group.all_gather(whole, piece)
        return whole

    def _forward(self, micro_batch: int) -> None:
        work = self.work[micro_batch]
        if self.module.is_first:
            assert self.tokens is not None
            work.input = self.tokens[micro_batch]
        with torch.set_grad_enabled(not self.place.stage.recompute):
            work.output = self._apply(micro_batch)
        if self.module.is_last:
            self.loss += work.output.detach()

    def _recompute(self, micro_batch: int) -> None:
        self.work[micro_batch].output = self._apply(micro_batch)

    def _apply(self, micro_batch: int) -> Tensor:
        x = self.work[micro_batch].input
        assert x is not None
        if not self.module.is_first and torch.is_grad_enabled():
            x.requires_grad_()
        if not self.module.is_last:
            return self.module(x)
        assert self.targets is not None
        return self.module(x, self.targets[micro_batch]) / self.tokens_per_step

    def _send_activation(self, micro_batch: int) -> None:
        work = self.work[micro_batch]
        assert work.output is not None
        self.outboxes[Kind.SEND_ACTIVATION].send(work.output.detach())
        if self.place.stage.recompute:
            work.output = None

    def _backward(self, micro_batch: int) -> None:
        work = self.work[micro_batch]
        assert work.output is not None and work.input is not None
        torch.autograd.backward(work.output, work.gradient)
        work.gradient, work.input, work.output = work.input.grad, None, None

    def _send_gradient(self, micro_batch: int) -> None:
        gradient = self.work.pop(micro_batch).gradient
        assert gradient is not None
        self.outboxes[Kind.SEND_GRADIENT].send(gradient)

    def _update(self, learning_rate: float) -> Tensor:
        """Clips by the norm over all ranks and updates; gives [loss, norm] on the device.

        Every rank fills in the norms it answers for, and the loss; one all-gather carries both.
        A replicated parameter is counted once, and with one rank a parameter the result is bit
        for bit that of torch.nn.utils.clip_grad_norm_.
        """
        tp_index = self.groups.tensor_parallel.index
        row = torch.zeros(
            self.parameter_count + 1, device=self.device, dtype=self.flat.gradients.dtype
        )
        first, count = self.first_parameter, len(self.flat.entries)
        row[first : first + count] = self.flat.norms(tp_index)
        if self.module.is_last and tp_index == 0:
            row[-1] = self.loss
        table = row.new_empty(dist.get_world_size() * len(row))
        all_gather(table, row)
        table = table.view(-1, len(row))
        total = torch.linalg.vector_norm(torch.linalg.vector_norm(table[:, :-1], dim=0))
        clip(self.flat.shard_gradient, total, self.hyperparameters.gradient_clip)
        self.flat.update(learning_rate)
        return torch.stack((table[:, -1].sum(), total))
