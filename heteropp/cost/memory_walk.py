"""What a rank holds, action after action of a step, as the executor runs them.

It needs a whole plan and walks every action (csrc/planner/memory_walk.cpp), which is too slow for
most planners: stage_memory.py has the estimate that those use.

Where it is not known when a message has left or a reduction is done, it is taken to be late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from heteropp import _planner
from heteropp.cost.stage_memory import (
    Memory,
    StageShape,
    framework_bytes,
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
from heteropp.schedule.action import CODE, Coded, Kind
from heteropp.schedule.inboxes import received_ahead
from heteropp.schedule.stage_actions import links


@dataclass(frozen=True, kw_only=True)
class Ministage:
    """Bytes of one rank, and of one micro-batch where it is about activations; see StageTrace.

    Of one that runs in slices they are at one of them.
    """

    flat: int
    gradient: int
    shard: int  # of the gradient, that the optimizer updates
    expert_shard: int  # the same of experts that lie over ranks
    reduced: int  # of the reduced gradient, where it is not the gradient itself
    staying: int  # of the gradient, where ZeRO-2 lets go of all of which others have copies
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
    between_slices: int
    exchange: Exchange  # in bytes

    @property
    def figures(self) -> tuple[int, ...]:
        """What the native walk takes, in its order."""
        return (
            *(self.flat, self.gradient, self.reduced, self.input, self.output, self.kept),
            *(self.forward_peak, self.backward_input_peak, self.backward_weight_peak),
            *(self.put_off, self.parts, self.update_peak),
            *(self.exchange.sent + self.exchange.received, self.exchange.to_self, self.staying),
            self.between_slices,
        )


def ministage(
    plan: Plan,
    shape: StageShape,
    layers: tuple[int, int],
    cut_backward: bool,
    exchange: Exchange,
    profile: ChipProfile | None,
) -> Ministage:
    """Returns the bytes that one ministage of a stage needs; exchange: in elements."""
    own = shape.holding(plan.model, layers)
    traces = stage_traces(plan.model, own, profile, whole_backward=not cut_backward)

    def of(what: Callable[[StageTrace], int]) -> int:
        return traces.of(own.layers, what)

    shards, expert_shards = (shape.dp, shape.expert_copies) if shape.zero_stage else (1, 1)
    width = max(4, plan.model.dtype_bytes)
    gradient, of_experts = of(lambda t: t.gradient_bytes), of(lambda t: t.expert_gradient_bytes)
    shard = _shard_bytes(gradient, shards, width)
    expert_shard = _shard_bytes(of_experts, expert_shards, width)
    update_peak = max(
        of(lambda t: t.update_peak_bytes) // shards,
        of(lambda t: t.expert_update_peak_bytes) // expert_shards,
    )
    if shape.optimizer == "muon":
        update_peak = max(update_peak, orthogonal_bytes(plan.model, traces, gradient, shards))
    if shape.in_place_update:
        update_peak = 0
    again = _gathered_again_bytes(plan, shape)
    return Ministage(
        flat=of(lambda t: t.flat_bytes),
        gradient=gradient + of_experts,
        shard=shard,
        expert_shard=expert_shard,
        reduced=shard + (expert_shard if expert_shards > 1 else 0),
        staying=of_experts if expert_shards == 1 else 0,
        constant=of(lambda t: t.constant_bytes),
        input=traces.one.input_bytes,
        output=0 if own.last else traces.one.output_bytes,
        kept=of(lambda t: t.kept_bytes) - own.layers * again,
        forward_peak=of(lambda t: t.forward_peak_bytes) - (own.layers - 1) * again,
        backward_input_peak=traces.peak(own.layers, lambda t: t.backward_input_peak_bytes)
        - (own.layers - 1) * again,
        backward_weight_peak=of(lambda t: t.backward_weight_peak_bytes),
        put_off=of(lambda t: t.put_off_bytes),
        parts=of(lambda t: t.parts_bytes),
        update_peak=update_peak,
        matrix=of(lambda t: t.matrix_bytes),
        between_slices=of(lambda t: t.between_slices_bytes),
        exchange=replace(
            exchange,
            sent=exchange.sent * width,
            received=exchange.received * width,
            to_self=exchange.to_self * width,
        ),
    )


def _shard_bytes(gradient_bytes: int, shards: int, width: int) -> int:
    """width: of an element, in bytes."""
    aligned = shards * ALIGNMENT * width
    return -(-gradient_bytes // aligned) * ALIGNMENT * width


def _gathered_again_bytes(plan: Plan, shape: StageShape) -> int:
    """Returns the bytes that a block does not keep of what attention and MLP begin with, where
    only a rank's own rows are kept.
    """
    if not shape.gathers_again or not shape.sequence_parallel:
        return 0
    whole_bytes = shape.rows(plan.model) * plan.model.hidden * plan.model.dtype_bytes
    return 2 * whole_bytes * (shape.tp - 1) // shape.tp


class MemoryWalk:
    """Follows the memory of one rank through the actions of one step (csrc/planner)."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        shape: StageShape,
        table: Sequence[Coded],
        profile: ChipProfile | None = None,
    ) -> None:
        """shape: the rank's stage; table: the rank's actions, in order.

        profile: what was measured of the chip. Raises ProfileError where it does not know the
        stage.
        """
        p, s, _, _ = plan.place(rank)
        pipeline = plan.pipelines[p]
        first_half = CODE[Kind.I]
        halved = {k for kind, _, k in table if kind == first_half}
        none, copies = Exchange(), exchanges(plan)
        by_slice = [
            [
                ministage(plan, at, layers, k in halved, copies.get((rank, k), none), profile)
                for at in shape.slices
            ]
            for k, layers in enumerate(ministage_layers(pipeline, plan.schedule)[s])
        ]
        ministages = [slices[0] for slices in by_slice]  # for what no slice changes
        between = links(plan.schedule, pipeline)
        handed = {a[1]: b[1] for a, b in between if a[0] == b[0] == s}
        ahead = received_ahead(plan.schedule, pipeline).items()
        turn, _ = plan.shard(rank)
        self._optimizer = sum(
            optimizer_bytes(plan.model, shape, m.shard, (turn + 1) * m.shard, m.matrix)
            + optimizer_bytes(plan.model, shape, m.expert_shard, m.expert_shard, 0)
            for m in ministages
        )
        self._constants = sum(m.constant for m in ministages)
        count = pipeline.micro_batches * pipeline.parts(s)
        self._tokens = sum(tokens_bytes(plan.model, at, count) for at in shape.slices)
        self._framework = framework_bytes(profile)
        self._walked = _planner.walk_memory(
            table,
            ministages=[[at.figures for at in slices] for slices in by_slice],
            following=[handed.get(k, -1) for k in range(len(ministages))],
            ahead=[(CODE[kind], k, many) for (t, k, kind), many in ahead if t == s],
            fixed_bytes=self._optimizer + self._constants + self._tokens + self._framework,
            gathers=shape.pieces if plan.resharding == "all-gather" else 1,
            dp=shape.dp,
            zero_stage=shape.zero_stage,
            under_way=SENDS_UNDER_WAY,
            keeps=not shape.recompute,
            offload=shape.offload,
            in_place_update=shape.in_place_update,
            overlap=plan.overlap,
        )

    def before(self) -> int:
        """Bytes held before a step."""
        return self._walked.before

    def moments(self) -> Iterator[tuple[int, int]]:
        """Yields, for each action, the most bytes held during it and the bytes held after it."""
        return zip(self._walked.during, self._walked.after, strict=True)

    def peak(self) -> Memory:
        parameters, gradients, kept, working, recomputed, boundary = self._walked.most
        return Memory(
            parameters=parameters,
            gradients=gradients,
            optimizer=self._optimizer,
            constants=self._constants,
            tokens=self._tokens,
            kept=kept,
            working=working,
            recomputed=recomputed,
            boundary=boundary,
            framework=self._framework,
            host=self._walked.host,
        )
