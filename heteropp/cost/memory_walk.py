"""What a rank holds, action after action of a step, as the executor runs them.

It needs a whole plan and walks every action, which is too slow for a planner: stage_memory.py has
the estimate that planners use.

Where it is not known when a message has left or a reduction is done, it is taken to be late.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from heteropp.cost.stage_memory import (
    SCALARS_BYTES,
    Memory,
    StageShape,
    optimizer_bytes,
    orthogonal_bytes,
    stage_traces,
    tokens_bytes,
)
from heteropp.cost.tracing.traces import StageTrace
from heteropp.description.plan import Plan, ministage_layers
from heteropp.description.profile import ChipProfile
from heteropp.layout.flat_buffer import ALIGNMENT
from heteropp.layout.resharding import SENDS_UNDER_WAY
from heteropp.optimizer.replicated_gradients import Exchange, exchanges
from heteropp.schedule.action import Action, Kind
from heteropp.schedule.inboxes import received_ahead
from heteropp.schedule.residence import (
    BEGINS_BACKWARD,
    NEEDS_PARAMETERS,
    Item,
    backwards,
    following,
)
from heteropp.schedule.stage_actions import links


@dataclass(frozen=True, kw_only=True)
class Ministage:
    """Bytes of one rank, and of one micro-batch where it is about activations; see StageTrace."""

    flat: int
    gradient: int
    shard: int  # of the reduced gradient
    constant: int
    input: int
    output: int  # none of the last, which ends in the loss
    kept: int
    forward_peak: int
    backward_input_peak: int
    backward_weight_peak: int
    put_off: int
    parts: int
    update_peak: int
    matrix: int
    exchange: Exchange  # in bytes


def ministage(
    plan: Plan,
    shape: StageShape,
    layers: tuple[int, int],
    cut_backward: bool,
    exchange: Exchange,
    profile: ChipProfile | None,
) -> Ministage:
    """Returns the bytes that one ministage of a stage needs; exchange: in elements."""
    first, last = layers[0] == 0, layers[1] == plan.model.layers
    own = replace(
        shape,
        layers=layers[1] - layers[0],
        first=first,
        last=last,
        ministages=1,
        blocks=plan.model.block_counts([layers]),
    )
    traces = stage_traces(plan.model, own, profile, whole_backward=not cut_backward)

    def of(what: Callable[[StageTrace], int]) -> int:
        return traces.of(own.layers, what)

    shards = shape.dp if shape.zero_stage else 1
    width = max(4, plan.model.dtype_bytes)
    gradient = of(lambda t: t.gradient_bytes)
    aligned = shards * ALIGNMENT * width
    update_peak = of(lambda t: t.update_peak_bytes) // shards
    if shape.optimizer == "muon":
        update_peak = max(update_peak, orthogonal_bytes(plan.model, traces, gradient, shards))
    if shape.in_place_update:
        update_peak = 0
    again = _gathered_again_bytes(plan, shape)
    return Ministage(
        flat=of(lambda t: t.flat_bytes),
        gradient=gradient,
        shard=-(-gradient // aligned) * ALIGNMENT * width,
        constant=of(lambda t: t.constant_bytes),
        input=traces.one.input_bytes,
        output=0 if last else traces.one.output_bytes,
        kept=of(lambda t: t.kept_bytes) - own.layers * again,
        forward_peak=of(lambda t: t.forward_peak_bytes) - (own.layers - 1) * again,
        backward_input_peak=traces.peak(own.layers, lambda t: t.backward_input_peak_bytes)
        - (own.layers - 1) * again,
        backward_weight_peak=of(lambda t: t.backward_weight_peak_bytes),
        put_off=of(lambda t: t.put_off_bytes),
        parts=of(lambda t: t.parts_bytes),
        update_peak=update_peak,
        matrix=of(lambda t: t.matrix_bytes),
        exchange=replace(
            exchange,
            sent=exchange.sent * width,
            received=exchange.received * width,
            to_self=exchange.to_self * width,
        ),
    )


def _gathered_again_bytes(plan: Plan, shape: StageShape) -> int:
    """Returns the bytes that a block does not keep of what attention and MLP begin with, where
    only a rank's own rows are kept.
    """
    if not shape.gathers_again or not shape.sequence_parallel:
        return 0
    rows = shape.sequences * plan.model.sequence_length
    return 2 * rows * plan.model.hidden * plan.model.dtype_bytes * (shape.tp - 1) // shape.tp


class LiveSizes:
    """Sizes by name, and their sum."""

    def __init__(self) -> None:
        self.sizes: dict[object, int] = {}
        self.total = 0

    def of(self, name: object) -> int:
        return self.sizes.get(name, 0)

    def put(self, name: object, size: int) -> None:
        self.total += size - self.of(name)
        self.sizes[name] = size

    def take(self, name: object) -> int:
        size = self.sizes.pop(name, 0)
        self.total -= size
        return size


class MemoryWalk:
    """Follows the memory of one rank through the actions of one step."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        shape: StageShape,
        table: Sequence[Action],
        profile: ChipProfile | None = None,
    ) -> None:
        """shape: the rank's stage; table: the rank's actions, in order.

        profile: what was measured of the chip. Raises ProfileError where it does not know the
        stage.
        """
        p, s, _, _ = plan.place(rank)
        pipeline = plan.pipelines[p]
        self.plan, self.shape, self.table = plan, shape, table
        self.keeps = not shape.recompute  # what a backward needs of its forward
        self.cut = shape.dp > 1 and shape.zero_stage > 0  # gradients, over the replicas
        halved = {action.ministage for action in table if action.kind == Kind.I}
        none = Exchange()
        self.ministages = [
            ministage(
                plan, shape, layers, k in halved, exchanges(plan).get((rank, k), none), profile
            )
            for k, layers in enumerate(ministage_layers(pipeline, plan.schedule)[s])
        ]
        handed = [(a[1], b[1]) for a, b in links(plan.schedule, pipeline) if a[0] == b[0] == s]
        self.following, self.previous = dict(handed), {b: a for a, b in handed}
        self.ahead = {
            (kind, k): count
            for (t, k, kind), count in received_ahead(plan.schedule, pipeline).items()
            if t == s
        }
        self.coming = Counter((action.kind, action.ministage) for action in table)
        self.gathers = shape.pieces if plan.resharding == "all-gather" else 1
        self.resident, self.backwards = following(table), backwards(table)
        self.begun = 0  # backwards
        self.away: dict[Item, int] = {}  # activations that wait on the host
        self.outboxes: dict[tuple[Kind, int], deque[object]] = {}
        self.unsummed: list[int] = []  # ministages
        self.gradients, self.kept, self.boundary = LiveSizes(), LiveSizes(), LiveSizes()
        self.parameters = sum(m.flat for m in self.ministages)
        if shape.offload:
            self._hold(0, self.resident[0])
        if shape.zero_stage < 2:
            for k, own in enumerate(self.ministages):
                self.gradients.put(("whole", k), own.gradient)
        turn, _ = plan.shard(rank)
        self.optimizer = sum(
            optimizer_bytes(plan.model, shape, m.shard, (turn + 1) * m.shard, m.matrix)
            for m in self.ministages
        )
        self.constants = sum(m.constant for m in self.ministages)
        count = pipeline.micro_batches * pipeline.parts(s)
        self.tokens = tokens_bytes(plan.model, shape, count)
        self.during = 0  # the most bytes during the action that runs
        self.most: Memory | None = None
        self.most_bytes = 0
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

    def before(self) -> int:
        """Bytes held before a step."""
        return self._total()

    def moments(self) -> Iterator[tuple[int, int]]:
        """Yields, for each action, the most bytes held during it and the bytes held after it."""
        for (kind, k), ahead in self.ahead.items():
            self._post(kind, k, min(ahead, self.coming[kind, k]))
        for n, action in enumerate(self.table):
            k, i = action.ministage, action.micro_batch
            self.during = 0
            if self.shape.offload:
                self._bring(action, self.resident[n])
            if action.kind == Kind.REDUCE:
                self._reduce(k)
            elif action.kind == Kind.STEP:
                self._step()
            else:
                assert i is not None
                self.run[action.kind](k, i)
            self._note()
            yield self.during, self._total()

    def peak(self) -> Memory:
        for _ in self.moments():
            pass
        assert self.most is not None
        return self.most

    def _total(self) -> int:
        held = self.gradients.total + self.kept.total + self.boundary.total
        return (
            self.parameters + self.optimizer + self.constants + self.tokens + held + SCALARS_BYTES
        )

    def _note(self, working: int = 0, own: int = 0, taken: int = 0, recomputed: int = 0) -> None:
        """Takes the bytes held at this moment into the peaks.

        `working` contains the kept and boundary tensors that it uses; `own` and `taken` are their
        bytes, which would be counted twice otherwise. `recomputed` is a part of `working`.
        """
        total = self._total() + working - own - taken
        self.during = max(self.during, total)
        if total > self.most_bytes:
            self.most_bytes = total
            self.most = Memory(
                parameters=self.parameters,
                gradients=self.gradients.total,
                optimizer=self.optimizer,
                constants=self.constants,
                tokens=self.tokens,
                kept=self.kept.total - own,
                working=working,
                recomputed=recomputed,
                boundary=self.boundary.total - taken,
                framework=SCALARS_BYTES,
            )

    # what comes and goes between stages

    def _post(self, kind: Kind, k: int, count: int) -> None:
        own = self.ministages[k]
        size = own.input if kind == Kind.RECV_ACTIVATION else own.output
        self.boundary.put(("posted", kind, k), count * size // self.gathers)

    def _receive(self, kind: Kind, k: int) -> None:
        """Posts the next receive: the executor does so before it waits for this one."""
        self.coming[kind, k] -= 1
        self._post(kind, k, min(self.ahead[kind, k], self.coming[kind, k]))

    def _receive_activation(self, k: int, i: int) -> None:
        self._receive(Kind.RECV_ACTIVATION, k)
        self.boundary.put(("input", k, i), self.ministages[k].input // self.gathers)

    def _receive_gradient(self, k: int, i: int) -> None:
        self._receive(Kind.RECV_GRADIENT, k)
        self.boundary.put(("gradient", k, i), self.ministages[k].output // self.gathers)

    def _gather_activation(self, k: int, i: int) -> None:
        self._gather(("input", k, i), self.ministages[k].input)

    def _gather_gradient(self, k: int, i: int) -> None:
        self._gather(("gradient", k, i), self.ministages[k].output)

    def _gather(self, name: object, size: int) -> None:
        if self.gathers > 1:
            self._note(working=size)
        self.boundary.put(name, size)

    def _send_activation(self, k: int, i: int) -> None:
        """Charges the output that leaves, unless it is a part of what its forward keeps."""
        size = self.boundary.take(("output", k, i))
        self._send(Kind.SEND_ACTIVATION, k, i, size)

    def _send_gradient(self, k: int, i: int) -> None:
        self._send(Kind.SEND_GRADIENT, k, i, self.boundary.take(("gradient", k, i)))

    def _send(self, kind: Kind, k: int, i: int, size: int) -> None:
        name = kind, k, i
        under_way = self.outboxes.setdefault((kind, k), deque())
        if len(under_way) == SENDS_UNDER_WAY:
            self.boundary.take(under_way.popleft())
        self.boundary.put(name, size)
        under_way.append(name)
        if not self.plan.overlap:
            self._note()
            self.boundary.take(under_way.popleft())

    # what computes

    def _forward(self, k: int, i: int) -> None:
        own, item = self.ministages[k], (k, i)
        shared = self._shared(k)
        self._note(own.forward_peak - shared, taken=self.boundary.of(("input", k, i)))
        self.boundary.take(("input", k, i))
        kept = own.kept - shared if self.keeps else own.input
        if self.shape.offload and self.keeps:
            kept -= own.output
        if self.shape.offload and item != self.backwards[self.begun]:
            self.away[item] = kept
        else:
            self.kept.put(item, kept)
        apart = own.output if self.shape.offload or not self.keeps else 0
        if k in self.following:
            self.boundary.put(("input", self.following[k], i), apart)
        else:
            self.boundary.put(("output", k, i), apart)

    def _shared(self, k: int) -> int:
        """Returns the bytes of a ministage's input that are counted already, because the ministage
        of this rank that hands it over keeps it.
        """
        if k in self.previous and self.keeps and not self.shape.offload:
            return self.ministages[k].input
        return 0

    def _recompute(self, k: int, i: int) -> None:
        own = self.ministages[k]
        again = own.kept - own.input
        self._note(own.forward_peak, self.kept.of((k, i)), recomputed=again)
        self.kept.put((k, i), own.kept)

    def _backward(self, k: int, i: int) -> None:
        own, item = self.ministages[k], (k, i)
        if (whole := ("whole", k)) not in self.gradients.sizes:
            self._make_room()
            self.gradients.put(whole, own.gradient)
        peak = own.backward_input_peak - self._shared(k)
        if self.shape.offload and self.keeps and k not in self.following:
            peak -= own.output
        names = ("gradient", k, i), ("output", k, i)
        taken = sum(map(self.boundary.of, names))
        recomputed = 0 if self.keeps else own.kept - own.input
        self._note(peak, self.kept.of(item), taken, recomputed)
        self.kept.take(item)
        for name in names:
            self.boundary.take(name)
        if (sent := (Kind.SEND_ACTIVATION, k, i)) in self.boundary.sizes:
            self.boundary.put(sent, own.output)  # no longer a part of what is kept
        if k in self.previous:
            before = self.previous[k]
            self.boundary.put(("gradient", before, i), own.input)
            if self.shape.offload and self.keeps:  # it came back with what is kept here
                self.boundary.put(("output", before, i), own.input)
        else:
            self.boundary.put(("gradient", k, i), own.input)
        if (Kind.W, k) in self.coming:
            self.kept.put(("put off", k, i), own.put_off)

    def _weight_gradients(self, k: int, i: int) -> None:
        later = self.kept.of(("put off", k, i))
        self._note(self.ministages[k].backward_weight_peak, later)
        self.kept.take(("put off", k, i))

    # gradients and the update

    def _make_room(self) -> None:
        """Ends reductions until one is left: with ZeRO-2 only two ministages' whole gradients
        stand at once, one at work and one being reduced.
        """
        while len(self.unsummed) > 1:
            self._sum_next()

    def _reduce(self, k: int) -> None:
        own = self.ministages[k]
        if self.cut and not self.shape.in_place_update:
            self.gradients.put(("reduced", k), own.shard)
        self._note(own.parts)
        self.unsummed.append(k)
        if self.shape.dp == 1 or self.shape.zero_stage < 2:
            self._sum_next()

    def _sum_next(self) -> None:
        k = self.unsummed.pop(0)
        exchange = self.ministages[k].exchange
        if self.cut and self.shape.zero_stage == 2:
            self.gradients.take(("whole", k))
        self.gradients.put(("exchanged", k), exchange.sent + exchange.received)
        self.gradients.put(("to self", k), exchange.to_self)
        self._note()

    def _step(self) -> None:
        self._note()
        while self.unsummed:
            self._sum_next()
        for k in range(len(self.ministages)):
            self.gradients.take(("exchanged", k))
            self.gradients.take(("to self", k))
        for k, own in enumerate(self.ministages):
            if self.shape.offload:
                others = [other for other in self.on_chip if other != k]
                self._hold(k, others[0] if others else k)
            self._note(own.update_peak)
        for k in range(len(self.ministages)):
            self.gradients.take(("reduced", k))
            if self.shape.zero_stage == 2:
                self.gradients.take(("whole", k))
        for under_way in self.outboxes.values():
            for name in under_way:
                self.boundary.take(name)

    # what comes from the host

    def _bring(self, action: Action, other: int) -> None:
        if action.kind in NEEDS_PARAMETERS:
            self._hold(action.ministage, other)
        if action.kind not in BEGINS_BACKWARD or self.begun == len(self.backwards):
            return
        if (action.ministage, action.micro_batch) == self.backwards[self.begun]:
            self.begun += 1
            for item in self.backwards[self.begun - 1 : self.begun + 1]:
                if item in self.away:
                    self.kept.put(item, self.away.pop(item))

    def _hold(self, ministage: int, other: int) -> None:
        self.on_chip = sorted({ministage, other})
        self.parameters = sum(self.ministages[k].flat for k in self.on_chip)
