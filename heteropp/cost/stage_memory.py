"""The memory of a stage: peak bytes of each of its ranks, by what they are for.

Planners ask for it before there is a plan: of a stage with so many layers and so many micro-batches
in flight, as a function that is affine in both, so that they need it at a few points only. Once
there is a plan, memory_walk.py follows its actions, which says more exactly what a rank holds: it
decides whether a plan fits. Both take a stage's bytes from the same traces, and what is said here
is never less than what the walk finds, but for how shards are rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from heteropp.cost.tracing.kind import Spread, StageKind
from heteropp.cost.tracing.traces import BlockTraces, StageTrace, StageTraces, trace_stages
from heteropp.description.hyperparameters import OptimizerName
from heteropp.description.plan import Schedule
from heteropp.description.profile import ChipProfile, Kind
from heteropp.layout.resharding import SENDS_UNDER_WAY
from heteropp.models.spec import BlockCounts, ModelSpec

PUTTING_OFF: tuple[Schedule, ...] = ("zb-h1", "zb-v")  # what a W waits with stays on the chip
SCALARS_BYTES = 8192  # the loss, norms, and the rounding of allocations


@dataclass(frozen=True, kw_only=True)
class StageShape:
    """What the cost of a stage depends on, beside the chip."""

    layers: int
    first: bool
    last: bool
    tp: int
    dp: int  # ranks that hold the same slices, and sum their gradients
    sequences: int  # of a micro-batch, in one replica
    zero_stage: int
    recompute: bool
    ministages: int = 1
    schedule: Schedule = "1f1b"
    offload: bool = False
    sequence_parallel: bool = False
    selective_recompute: bool = False
    optimizer: OptimizerName = "adamw"
    copies: int = 1  # places in the plan that hold its layers, and sum their gradients
    # other software's: it updates in one kernel, and reduces gradients where they are
    in_place_update: bool = False
    # other software's, too: it keeps the rows that sequence parallelism cuts, and a backward
    # gathers them once more
    gathers_again: bool = False
    blocks: BlockCounts = ()  # its layers by kind; empty: mixed as in the whole model
    token_shares: tuple[int, ...] | None = None  # of a replica with context parallelism
    cp_index: int = 0  # which of them it has
    sliced: bool = False  # whether they are slices, which one rank runs in turn, in their place
    spread: Spread | None = None  # of a stage with expert parallelism
    # times the even number of rows that its experts take at most; None: taken to be even
    expert_capacity: float | None = None

    @property
    def expert_copies(self) -> int:
        """The number of ranks that hold the same experts, where these lie over ranks."""
        return self.dp // len(self.spread.shares) if self.spread else self.dp

    def rows(self, model: ModelSpec) -> int:
        """Returns the rows of a micro-batch that one tensor-parallel group works on."""
        if self.token_shares is None:
            return self.sequences * model.sequence_length
        return self.sequences * self.token_shares[self.cp_index]

    def kind(self, whole_backward: bool = False) -> StageKind:
        """Returns what its traces depend on; whole_backward: none of a backward is put off."""
        return StageKind(
            "",
            self.first,
            self.last,
            self.tp,
            self.sequences,
            self.sequence_parallel,
            self.selective_recompute,
            whole_backward,
            self.optimizer,
            self.token_shares,
            self.cp_index,
            self.sliced,
            self.spread,
        )

    @property
    def slices(self) -> tuple[StageShape, ...]:
        """The stage at each of the slices that it runs in turn, or at whole sequences."""
        if not self.sliced or self.token_shares is None:
            return (self,)
        return tuple(replace(self, cp_index=i) for i in range(len(self.token_shares)))

    def holding(self, model: ModelSpec, span: tuple[int, int]) -> StageShape:
        """Returns the stage as if it held layers [first, last) alone, as one ministage."""
        first, last = span
        return replace(
            self,
            layers=last - first,
            first=first == 0,
            last=last == model.layers,
            ministages=1,
            blocks=model.block_counts([span]),
        )

    @property
    def is_profiled(self) -> bool:
        """Whether profiles measure such stages, or others that differ in experts alone."""
        cut = self.sequence_parallel or self.selective_recompute or self.token_shares
        return not cut and self.optimizer == "adamw"

    @property
    def pieces(self) -> int:
        """The number of pieces that a replica receives a boundary tensor in, one for each rank,
        before it gathers them; 1 with sequence parallelism, which gathers none.
        """
        return 1 if self.sequence_parallel else self.tp


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Peak bytes of one rank, by what they are for; they add up but for `recomputed` and `host`."""

    parameters: int
    gradients: int  # whole and reduced ones, and what comes and goes to sum copies
    optimizer: int  # its averages, and a 16-bit model's master copy
    constants: int  # causal mask and rotary angles
    tokens: int  # of the whole step, and of the next
    kept: int  # by the forwards of the micro-batches in flight, but for the one at work
    working: int  # the most that the micro-batch at work, or the update, holds
    recomputed: int  # part of working: what a forward would have kept
    boundary: int  # pieces received ahead, and tensors under way
    framework: int  # scalars, the rounding of allocations, and what libraries keep for good
    host: int = 0  # the most that offloading puts into the node's host memory

    @cached_property  # ranks that are alike share one
    def total(self) -> int:
        standing = self.parameters + self.gradients + self.optimizer + self.constants + self.tokens
        return standing + self.kept + self.working + self.boundary + self.framework


def stage_memory(
    model: ModelSpec,
    shape: StageShape,
    in_flight: float,
    micro_batches: int,
    profile: ChipProfile | None = None,
) -> Memory:
    """Predicted peak bytes of a rank.

    in_flight: the most micro-batches it holds at once, in units of all its layers' activations.

    Affine in the layers where there is one ministage. Where ministages run in turn, ZeRO-2 has
    the whole gradients of two at once, one at work and one being reduced. With offloading the
    parameters of two are there, one at work and one to come, and of other micro-batches only
    what the next one needs (Zorse, sections 4.1.1 to 4.1.3).

    profile: what was measured of the chip, in place of what is traced of activations. Raises
    ProfileError where it does not know the stage.
    """
    traces = stage_traces(model, shape, profile)
    of = traces.of

    longest = math.ceil(shape.layers / shape.ministages)  # ministage

    def ministages(count: int, what: Callable[[StageTrace], int]) -> int:
        return of(min(count * longest, shape.layers), what)

    shards, expert_shards = _shards(shape)
    parameters = ministages(2 if shape.offload else shape.ministages, lambda t: t.flat_bytes)
    gradient = of(shape.layers, lambda t: t.gradient_bytes)
    of_experts = of(shape.layers, lambda t: t.expert_gradient_bytes) // expert_shards

    own = of(longest, lambda t: t.input_bytes if shape.recompute else t.kept_bytes)
    whole = _kept_bytes(model, shape, traces)
    if shape.schedule in PUTTING_OFF and not shape.first:
        # what W waits with may be more than what a forward keeps, above all where that is little
        # for a recompute; which micro-batches wait is not known here
        put_off = of(shape.layers, lambda t: t.put_off_bytes)
        if put_off > whole:
            own = whole = put_off
    kept = round(whole * in_flight) - own
    if shape.offload and shape.schedule not in PUTTING_OFF:
        kept = min(kept, own)
    gradients = _gradient_bytes(
        model, shape, kept, lambda count: ministages(count, _whole_gradient_bytes)
    )
    boundary = boundary_bytes(model, traces.one, shape, in_flight, micro_batches)
    # of the model's first stage, which has no one to send a gradient to, nothing is put off
    if shape.first and shape.ministages == 1 and shape.schedule not in PUTTING_OFF:
        at_work = stage_traces(model, shape, profile, whole_backward=True)
    else:
        at_work = traces
    working = at_work.peak(longest, _most_at_work)
    # the update comes when no micro-batch is held and no piece awaited
    updating = _update_bytes(model, shape, micro_batches, traces)
    working = max(working, updating - kept - boundary)
    recomputed = of(longest, lambda t: t.kept_bytes - t.input_bytes) if shape.recompute else 0
    return Memory(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer_bytes(
            model, shape, gradient // shards, gradient, of(shape.layers, lambda t: t.matrix_bytes)
        )
        + optimizer_bytes(model, shape, of_experts, of_experts, 0),
        constants=of(shape.layers, lambda t: t.constant_bytes),
        tokens=tokens_bytes(model, shape, micro_batches),
        kept=kept,
        working=working,
        recomputed=recomputed,
        boundary=boundary,
        framework=framework_bytes(profile),
    )


def framework_bytes(profile: ChipProfile | None) -> int:
    return SCALARS_BYTES + (profile.library_bytes if profile else 0)


def optimizer_bytes(
    model: ModelSpec, shape: StageShape, shard: int, end: int, matrices: int
) -> int:
    """Returns the bytes of a shard's averages, and of the master copy of a 16-bit model.

    shard: its bytes in the averages' dtype, in which `end` is where it ends in the whole buffer,
    and `matrices` where hidden matrices do, of whose squares Muon has no average.
    """
    copies = 2 if model.wide_dtype != model.dtype else 1
    squares = shard if shape.optimizer == "adamw" else min(shard, max(0, end - matrices))
    return copies * shard + squares


def tokens_bytes(model: ModelSpec, shape: StageShape, micro_batches: int) -> int:
    """Returns the bytes of the token ids that a rank holds: inputs on the model's first stage and
    targets on its last, int64, both for this step and for the next.
    """
    rows = micro_batches * shape.rows(model)
    return 2 * (int(shape.first) + int(shape.last)) * rows * 8


def _most_at_work(trace: StageTrace) -> int:
    """Returns the most bytes that a forward or a backward holds beyond what outlives it.

    Its own micro-batch's activations are among them. Another micro-batch's tensor may still be
    leaving then: an output beside a forward, or an input's gradient beside the second part of a
    backward.
    """
    forward = trace.forward_peak_bytes + trace.output_bytes
    weights = trace.backward_weight_peak_bytes + trace.input_bytes
    return max(forward, trace.backward_input_peak_bytes, weights)


def _update_bytes(
    model: ModelSpec, shape: StageShape, micro_batches: int, traces: StageTraces
) -> int:
    """Most that the update holds, beside what stays: the last boundary tensors are leaving."""
    of = traces.of
    shards, expert_shards = _shards(shape)
    longest = math.ceil(shape.layers / shape.ministages)  # they are updated one after another
    gradient = of(shape.layers, lambda t: t.gradient_bytes)
    of_experts = of(shape.layers, lambda t: t.expert_gradient_bytes)
    updating, late = of(longest, lambda t: t.update_peak_bytes) // shards, 0
    updating = max(updating, of(longest, lambda t: t.expert_update_peak_bytes) // expert_shards)
    if shape.optimizer == "muon":
        together = of(longest, lambda t: t.gradient_bytes)
        updating = max(updating, orthogonal_bytes(model, traces, together, shards))
    if shape.ministages == 1:  # the reduced gradient comes when no micro-batch is at work
        late = gradient // shards if shards > 1 else 0
        late += of_experts // expert_shards if expert_shards > 1 else 0
        updating = max(updating, _summed_bytes(model, shape, gradient))
    if shape.zero_stage == 2 and shards > 1:  # the whole gradients have gone
        standing = min(2 * longest, shape.layers) if shape.schedule == "gpipe" else shape.layers
        gone = of(standing, lambda t: t.gradient_bytes)
        if expert_shards > 1:
            gone = of(standing, _whole_gradient_bytes)
        updating = max(0, updating - gone)
    leaving = traces.one.input_bytes + _output_bytes(traces.one, shape)
    return updating + late + min(SENDS_UNDER_WAY, micro_batches) * leaving


def orthogonal_bytes(model: ModelSpec, traces: StageTraces, gradient: int, shards: int) -> int:
    """Returns the most bytes that Muon holds while it makes one matrix after another orthogonal.

    gradient: the bytes of the ministage's gradients, whose shards are gathered in 16 bits.
    """
    matrices = traces.most(lambda t: t.orthogonal_peak_bytes)
    if shards == 1:
        return matrices
    whole = 2 * gradient // (8 if model.wide_dtype == "float64" else 4)
    return matrices + whole + whole // shards


def _gradient_bytes(
    model: ModelSpec, shape: StageShape, kept: int, of_ministages: Callable[[int], int]
) -> int:
    """Returns the gradients' bytes when they and the kept activations together are at their peak.

    Under GPipe activations are freed, ministage by ministage, as reduced gradients arrive, so
    `kept` is taken off again: the caller adds it.
    """
    count, (shards, _) = shape.ministages, _shards(shape)
    gradient = of_ministages(count)
    coming = 0  # bytes of reduced and exchanged gradients once all ministages are reduced
    if count > 1:
        coming = (gradient // shards if shards > 1 else 0) + _summed_bytes(model, shape, gradient)
    if shape.schedule != "gpipe":
        return gradient
    most = 0
    for done in range(count + 1):  # ministages that are reduced
        goes = shape.zero_stage == 2 and shards > 1
        standing = of_ministages(min(done, 1) + 1) if goes else gradient
        most = max(most, standing + (coming * done + kept * (count - done)) // count)
    return most - kept


def _summed_bytes(model: ModelSpec, shape: StageShape, gradient_bytes: int) -> int:
    """Returns the bytes of gradients on their way to and from the other places that hold the same
    parameters.
    """
    result = 2 * (shape.copies - 1) * gradient_bytes
    if shape.first != shape.last or shape.ministages > 1:
        width = max(4, model.dtype_bytes)
        result += 2 * shape.copies * width * model.tied_elements // shape.tp
    return result // _shards(shape)[0]


def boundary_bytes(
    model: ModelSpec, one: StageTrace, shape: StageShape, in_flight: float, micro_batches: int
) -> int:
    """Pieces awaited and tensors leaving while the most micro-batches are in flight.

    With GPipe and 1F1B that ends with the last forward's first backward, and the gradients leaving
    then are of the micro-batches not in flight. An activation leaves as a part of what its
    micro-batch keeps, unless that is recomputed or on its way to the host.
    """
    in_order = shape.schedule in ("1f1b", "gpipe") and shape.ministages == 1
    before = max(0, math.ceil(micro_batches - in_flight)) if in_order else micro_batches
    output_bytes, input_bytes = _output_bytes(one, shape), one.input_bytes
    if shape.ministages > 1:  # one of which has another before it, and one another after it
        output_bytes = input_bytes = (
            shape.rows(model) * model.hidden * model.dtype_bytes * shape.pieces // shape.tp
        )
    awaited = output_bytes // shape.pieces if micro_batches > 1 else 0
    if before > SENDS_UNDER_WAY:
        awaited += input_bytes // shape.pieces
    leaving = input_bytes * min(SENDS_UNDER_WAY, before)
    if shape.recompute or shape.offload:
        leaving += output_bytes * min(SENDS_UNDER_WAY, micro_batches)
    return awaited + leaving


def _output_bytes(trace: StageTrace, shape: StageShape) -> int:
    return 0 if shape.last else trace.output_bytes


def _shards(shape: StageShape) -> tuple[int, int]:
    """Returns the number of ranks that shard what all hold alike, and the same of experts."""
    return (shape.dp, shape.expert_copies) if shape.zero_stage else (1, 1)


def _whole_gradient_bytes(trace: StageTrace) -> int:
    return trace.gradient_bytes + trace.expert_gradient_bytes


def kept_bytes(model: ModelSpec, shape: StageShape, profile: ChipProfile | None = None) -> int:
    """What the forward of a micro-batch keeps: with recomputing, each ministage's input alone.

    The model's first input is tokens, which the step holds.
    """
    return _kept_bytes(model, shape, stage_traces(model, shape, profile))


def _kept_bytes(model: ModelSpec, shape: StageShape, traces: StageTraces) -> int:
    if not shape.recompute:
        return traces.of(shape.layers, lambda t: t.kept_bytes)
    rows = shape.rows(model) * shape.pieces // shape.tp
    inner_bytes = (shape.ministages - 1) * rows * model.hidden * model.dtype_bytes
    return traces.one.input_bytes + inner_bytes


def stage_traces(
    model: ModelSpec, shape: StageShape, profile: ChipProfile | None, whole_backward: bool = False
) -> StageTraces:
    """Returns a stage's traces, with the bytes that the chip's profile measured if it measured
    the memory of such stages.

    Profiles measure ranks with all experts; where these lie over ranks, the bytes that were
    measured change as those that are traced do. A rank's experts are taken to be given as many rows
    as they have capacity for.
    """
    if shape.spread is not None and shape.expert_capacity is not None:
        shares = shape.spread.shares
        all_rows = Fraction(sum(shares), shares[0])  # times the even number
        times = min(Fraction(str(shape.expert_capacity)), all_rows)
        shape = replace(shape, spread=shape.spread.with_more_rows(times))
    if shape.ministages > 1:  # both ends of the model are in two of them, each with its embedding
        model = model.untied()
    traces = trace_stages(model, shape.kind(whole_backward), shape.blocks)
    kind = shape.first, shape.last, shape.tp, shape.sequences
    if profile is None or not shape.is_profiled or not profile.knows_memory(kind):
        return traces
    whole = replace(shape, spread=None).kind(whole_backward)
    (block,), (measured,) = traces.kinds, trace_stages(model, whole, shape.blocks).kinds

    def traced(layers: int) -> StageTrace:
        own, of_whole = (each.one if layers == 1 else each.two for each in (block, measured))
        return _measured(own, of_whole, layers, profile, kind)

    return StageTraces((BlockTraces(block.share, traced),))


def _measured(
    trace: StageTrace, whole: StageTrace, layers: int, profile: ChipProfile, kind: Kind
) -> StageTrace:
    """Returns a trace with what was measured; whole: the trace of what it was measured of."""

    def found(term: str, here: int, measured: int) -> int:
        return profile.bytes(term, layers, kind) + here - measured

    return replace(
        trace,
        input_bytes=found("kept_recompute_bytes", trace.input_bytes, whole.input_bytes),
        kept_bytes=found("kept_bytes", trace.kept_bytes, whole.kept_bytes),
        forward_peak_bytes=0,  # the backward's peak is of both
        backward_input_peak_bytes=found(
            "working_bytes", trace.backward_input_peak_bytes, whole.backward_input_peak_bytes
        ),
        update_peak_bytes=found("update_bytes", trace.update_peak_bytes, whole.update_peak_bytes),
    )
