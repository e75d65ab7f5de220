"""Runs a stage's forwards and backwards for real, as one rank of a tensor-parallel group
(sections 4.2 and 5).

The actions are those the simulator runs. The host is back long before the device is.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from heteropp.data.batch import Batch
from heteropp.description.plan import Plan, Stage
from heteropp.models.auxiliary_loss import Routing
from heteropp.models.parallel.backward import WeightGradients, backward, put_off
from heteropp.models.parallel.tensor_parallel import ProcessGroup
from heteropp.models.parallel.token_slices import Kept, TokenSlice
from heteropp.models.stage_module import StageModule
from heteropp.optimizer.flat import FlatBuffers
from heteropp.runtime.measuring.metrics import Clock, HostClock, Mark
from heteropp.runtime.measuring.waits import HostWaits
from heteropp.runtime.ranks.transport import Coordinates, Groups
from heteropp.runtime.step.auxiliary import AuxiliaryPasses
from heteropp.runtime.step.boundary import Inbox, Outbox, gather_boundary
from heteropp.runtime.step.offload import Offload
from heteropp.runtime.step.whole import WholeBackwards
from heteropp.schedule.action import Action, Kind
from heteropp.schedule.inboxes import received_ahead
from heteropp.schedule.stage_actions import actions


@dataclass
class MicroBatch:
    """What a ministage keeps of a micro-batch between its actions."""

    input: Tensor | None = None  # tokens or activations, [rows] or [rows, hidden]
    output: Tensor | GradientEdge | None = None  # activations or the loss
    gradient: Tensor | None = None  # of the output, then of the input
    later: WeightGradients | None = None  # what W has to do
    routing: Routing | None = None  # of a model with an auxiliary loss
    totals: Tensor | None = None  # of such a model's routers up to here


class Passes:
    """Adds the gradients of a batch to those that stand in the flat buffers of its modules."""

    def __init__(
        self,
        plan: Plan,
        place: Coordinates,
        groups: Groups,
        modules: Sequence[StageModule],
        flats: Sequence[FlatBuffers],
        clock: Clock,
    ) -> None:
        """`modules` and `flats`: one for each ministage of the stage, in its own order."""
        self.place, self.groups, self.modules, self.clock = place, groups, modules, clock
        self.flats: Sequence[FlatBuffers] = flats
        self.actions = actions(plan.schedule, place.pipeline, place.stage_index, plan.overlap)
        self.save_activations = not place.stage.recompute  # what a backward needs of its forward
        self.halved = {action.ministage for action in self.actions if action.kind == Kind.I}
        self.whole = WholeBackwards(self.actions) if isinstance(clock, HostClock) else None
        self.offload: Offload | None = None
        self.loss_scale = 1.0  # what the gradient of the loss is to be
        self.device, self.dtype = flats[0].values.device, flats[0].values.dtype
        self.resharding = plan.resharding
        self.auxiliary: AuxiliaryPasses | None = None
        if modules[0].auxiliary_loss is not None:
            given = modules[0].auxiliary_loss, self.device, flats[0].wide
            self.auxiliary = AuxiliaryPasses(plan, place, groups.context_parallel, *given)
        self._connect(plan)
        self.work: dict[tuple[int, int], MicroBatch] = {}  # by ministage and micro-batch
        self.kept: dict[int, dict[nn.Module, Kept]] = {}  # by micro-batch, for its slices
        self.waits = HostWaits()
        self.current: Action | None = None  # for whoever has to say what this rank was doing
        self.run: dict[Kind, Callable[[int, int], None]] = {
            Kind.RECV_ACTIVATION: self._receive_activation,
            Kind.GATHER_ACTIVATION: self._gather_activation,
            Kind.F: self._forward,
            Kind.SEND_ACTIVATION: self._send_activation,
            Kind.R: self._recompute,
            Kind.RECV_GRADIENT: self._receive_gradient,
            Kind.GATHER_GRADIENT: self._gather_gradient,
            Kind.B: self._backward,
            Kind.I: self._backward,
            Kind.SEND_GRADIENT: self._send_gradient,
            Kind.W: self._weight_gradients,
        }

    def _connect(self, plan: Plan) -> None:
        """Makes the boxes, and notes which ministages hand over to each other in place."""
        place = self.place
        ahead = received_ahead(plan.schedule, place.pipeline)
        count = Counter((action.kind, action.ministage) for action in self.actions)
        self.inboxes: dict[tuple[Kind, int], Inbox] = {}
        self.outboxes: dict[tuple[Kind, int], Outbox] = {}
        self.expected: dict[tuple[Kind, int], tuple[int, int]] = {}  # tensors a step, and ahead
        self.following: dict[int, int] = {}  # of ministages that hand over
        self.previous: dict[int, int] = {}

        lengths = place.pipeline.token_slices or (plan.model.sequence_length,)

        def boxes(
            k: int, neighbour: Stage, receive: Kind, send: Kind, tags: tuple[int, int]
        ) -> None:
            # activations go slice by slice, and gradients from the last slice to the first
            in_turn = lengths, lengths[::-1]
            comes, goes = in_turn if receive == Kind.RECV_ACTIVATION else in_turn[::-1]
            kind = self.device, self.dtype, plan.model.hidden
            self.inboxes[receive, k] = Inbox(plan, place, neighbour, comes, tags[0], *kind)
            self.outboxes[send, k] = Outbox(plan, place, neighbour, goes, tags[1])
            if self.auxiliary:
                self.auxiliary.connect(k, neighbour, receive, send, tags)
            self.expected[receive, k] = (
                count[receive, k],
                ahead[place.stage_index, k, receive],
            )

        for k in range(place.stage.ministages):
            before, after = place.before(k), place.after(k)
            if before and before.stage is not place.stage:
                tag = 2 * before.link  # of activations; gradients have the next
                boxes(k, before.stage, Kind.RECV_ACTIVATION, Kind.SEND_GRADIENT, (tag, tag + 1))
            if after and after.stage is not place.stage:
                tag = 2 * after.link
                boxes(k, after.stage, Kind.RECV_GRADIENT, Kind.SEND_ACTIVATION, (tag + 1, tag))
            elif after:
                self.following[k], self.previous[after.ministage] = after.ministage, k

    def accumulate(self, batch: Batch) -> None:
        """Runs a batch's actions; it neither zeroes gradients before nor reduces them after."""
        self.begin(batch)
        for action in self.actions:
            if action.micro_batch is not None:
                self._run(action)
        self.end()

    def begin(self, batch: Batch) -> None:
        """Gets ready for a batch's first action, and posts the first receives."""
        self.take(batch)
        self.marks: list[tuple[Action, Mark, Mark]] = []
        self.waits = HostWaits()
        self.begin_receives(Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT)

    def begin_receives(self, *kinds: Kind) -> None:
        """Posts the first receives of a batch's tensors of some kinds."""
        for inboxes in (self.inboxes, self.auxiliary.inboxes if self.auxiliary else {}):
            for (kind, k), inbox in inboxes.items():
                if kind in kinds:
                    inbox.begin(*self.expected[kind, k])

    def finish_sends(self) -> None:
        """Waits until all that was sent has left."""
        for outboxes in (self.outboxes, self.auxiliary.outboxes if self.auxiliary else {}):
            for outbox in outboxes.values():
                outbox.finish()

    def take(self, batch: Batch) -> None:
        """Makes a batch the one to work on."""
        self.batch = batch
        self.loss = torch.zeros((), device=self.device, dtype=self.flats[0].wide)
        self.work, self.kept = defaultdict(MicroBatch), defaultdict(dict)

    def end(self) -> None:
        """Ends a batch after its last action: waits until all that was sent has left."""
        self.finish_sends()
        self.current = None
        if self.whole:
            self.whole.learn(self.marks)

    def loss_contribution(self) -> Tensor:
        """Returns this rank's part of the batch's loss.

        The first rank of each tensor-parallel group returns the group's, and the others zero, so
        that it counts once.
        """
        return torch.zeros_like(self.loss) if self.place.tp_index else self.loss

    def _run(self, action: Action) -> None:
        self.current = action
        if self.offload:
            self.offload.before(action)
        begin = self.clock.mark()
        self._do(action)
        self.marks.append((action, begin, self.clock.mark()))

    def _do(self, action: Action) -> None:
        assert action.micro_batch is not None
        self.run[action.kind](action.ministage, action.micro_batch)

    def _receive_activation(self, k: int, i: int) -> None:
        with self.waits:
            self.work[k, i].input = self.inboxes[Kind.RECV_ACTIVATION, k].take()
            if self.auxiliary:
                self.work[k, i].totals = self.auxiliary.take(Kind.RECV_ACTIVATION, k)

    def _gather_activation(self, k: int, i: int) -> None:
        self.work[k, i].input = self._gather(self.work[k, i].input)

    def _receive_gradient(self, k: int, i: int) -> None:
        with self.waits:
            self.work[k, i].gradient = self.inboxes[Kind.RECV_GRADIENT, k].take()
            if self.auxiliary:
                self._ask(k, i, self.auxiliary.take(Kind.RECV_GRADIENT, k))

    def _gather_gradient(self, k: int, i: int) -> None:
        self.work[k, i].gradient = self._gather(self.work[k, i].gradient)

    def _gather(self, piece: Tensor | None) -> Tensor:
        group = self.groups.tensor_parallel
        assert piece is not None and isinstance(group, ProcessGroup)
        return gather_boundary(piece, group, self.resharding)

    def _forward(self, k: int, i: int) -> None:
        work = self.work[k, i]
        if self.modules[k].is_first:
            assert self.batch.tokens is not None
            work.input = self.batch.tokens[i]
        if self.auxiliary:
            work.routing = self.modules[k].new_routing(self.auxiliary.sequences)
        with torch.set_grad_enabled(self.save_activations), self._keeping(k, i):
            work.output = self._apply(k, i)
        if self.modules[k].is_last:
            self.loss += work.output.detach()
        if self.auxiliary:
            self._end_routing(k, i, self.auxiliary)
        if k in self.following:
            self.work[self.following[k], i].input = work.output.detach()
            if not self.save_activations:
                work.output = None

    def _end_routing(self, k: int, i: int, auxiliary: AuxiliaryPasses) -> None:
        """Adds up what routers did, and hands it over, or ends it in the auxiliary loss."""
        work = self.work[k, i]
        assert work.routing is not None
        work.totals = auxiliary.totals(work.routing, work.totals)
        if self.modules[k].is_last:
            assert self.batch.targets is not None
            given = self.batch.targets[i], self.batch.counted, self.loss_scale
            self.loss += auxiliary.ask(work.routing, work.totals, *given)
        if k in self.following:
            self.work[self.following[k], i].totals = work.totals

    def _ask(self, k: int, i: int, gradients: Tensor | None) -> None:
        """Notes what the auxiliary loss asks of a ministage's routers, before its backward."""
        routing = self.work[k, i].routing
        assert routing is not None
        routing.gradients = gradients

    def _keeping(self, k: int, i: int) -> AbstractContextManager[None]:
        if self.offload is None or not self.modules[k].training:
            return nullcontext()
        given = self.work[k, i].input
        assert given is not None
        staying = [each[i] for each in (self.batch.tokens, self.batch.targets) if each is not None]
        if self.batch.documents is not None:
            staying.append(self.batch.documents[i].ends)
        return self.offload.keeping((k, i), given, staying)

    def _recompute(self, k: int, i: int) -> None:
        self.work[k, i].output = self._apply(k, i)

    def _apply(self, k: int, i: int) -> Tensor:
        work, module, trains = self.work[k, i], self.modules[k], torch.is_grad_enabled()
        assert work.input is not None
        if not module.is_first and trains:
            work.input.requires_grad_()
        halves = trains and k in self.halved and not (self.whole and (k, i) in self.whole)
        module.routing = work.routing
        with put_off() if halves else nullcontext() as work.later:
            targets = documents = None
            if module.is_last:
                assert self.batch.targets is not None
                targets = self.batch.targets[i]
            if self.batch.documents is not None:
                documents = self.batch.documents[i]
            given = targets, self.batch.first_rows[i], documents, self._slice(i)
            found: Tensor = module(work.input, *given)
            return found / max(1, self.batch.counted) if module.is_last else found

    def _slice(self, i: int) -> TokenSlice | None:
        """Returns the slice that a number of the schedule stands for; None: sequences are whole."""
        pipeline = self.place.pipeline
        if pipeline.slice_ranges is None:
            return None
        micro_batch, index = divmod(i, pipeline.slices)
        return TokenSlice(pipeline.slice_ranges, index, self.kept[micro_batch])

    def _send_activation(self, k: int, i: int) -> None:
        work = self.work[k, i]
        assert isinstance(work.output, Tensor)
        self.outboxes[Kind.SEND_ACTIVATION, k].send(work.output.detach())
        if self.auxiliary:
            self.auxiliary.send(Kind.SEND_ACTIVATION, k, work.totals)
        if not self.save_activations:
            work.output = None
        elif self.offload and work.output.requires_grad:
            work.output = get_gradient_edge(work.output)  # all that the backward asks for

    def _backward(self, k: int, i: int) -> None:
        """Runs B, or I: the weight gradients that the forward put off then wait for W."""
        work = self.work[k, i]
        assert work.output is not None and work.input is not None
        if self.modules[k].is_last and self.loss_scale != 1:
            work.gradient = torch.full_like(self.loss, self.loss_scale)
        run = work.later.backward if work.later else backward
        run(work.output, work.gradient)
        work.gradient, work.input, work.output = work.input.grad, None, None
        if k in self.previous:
            self.work[self.previous[k], i].gradient, work.gradient = work.gradient, None
            if work.routing is not None:
                self._ask(self.previous[k], i, work.routing.gradients)

    def _send_gradient(self, k: int, i: int) -> None:
        work = self.work[k, i]
        assert work.gradient is not None
        self.outboxes[Kind.SEND_GRADIENT, k].send(work.gradient)
        if work.routing is not None:
            assert self.auxiliary is not None
            self.auxiliary.send(Kind.SEND_GRADIENT, k, work.routing.gradients)
        work.gradient = None

    def _weight_gradients(self, k: int, i: int) -> None:
        later = self.work[k, i].later
        if later is not None:  # else I has done it
            later.run()
