"""The memory of a stage: peak bytes of each of its ranks, by what they are for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from heteropp.model import Model
from heteropp.plan import Schedule
from heteropp.profile import ChipProfile, Kind
from heteropp.reshard import SENDS_UNDER_WAY
from heteropp.tracing.traces import StageTrace, trace_stages

SCALARS_BYTES = 4096  # the loss, norms, and the rounding of allocations


@dataclass(frozen=True, kw_only=True)
class StageShape:
    """What the cost of a stage depends on, beside the chip."""

    layers: int
    first: bool
    last: bool
    tp: int
    dp: int
    sequences: int  # of a micro-batch, in one replica
    zero_stage: int
    recompute: bool
    ministages: int = 1
    schedule: Schedule = "1f1b"
    offload: bool = False


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Peak bytes of one rank, by what they are for; they add up but for `recomputed`."""

    parameters: int
    gradients: int  # and, of several ministages with ZeRO, the reduced share
    optimizer: int  # AdamW's two averages, and the master copy of a bfloat16 model
    constants: int  # causal mask and rotary angles
    tokens: int  # of the whole step
    kept: int  # by the forwards of the micro-batches in flight, but for the one at work
    working: int  # the most that the micro-batch at work, or the update, holds
    recomputed: int  # part of working: what a forward would have kept
    boundary: int  # pieces received ahead, and tensors under way
    framework: int  # scalars, and the rounding of allocations

    @property
    def total(self) -> int:
        return sum(getattr(self, f.name) for f in fields(self) if f.name != "recomputed")


def stage_memory(
    model: Model,
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
    one, two = _traces(model, shape, profile)

    def of(layers: int, what: Callable[[StageTrace], int]) -> int:
        return what(one) + (layers - 1) * (what(two) - what(one))

    def stage(what: Callable[[StageTrace], int]) -> int:
        return of(shape.layers, what)

    longest = math.ceil(shape.layers / shape.ministages)  # ministage

    def two_ministages(what: Callable[[StageTrace], int]) -> int:
        return of(min(2 * longest, shape.layers), what)

    shards = _shards(shape)
    parameters = (two_ministages if shape.offload else stage)(lambda t: t.flat_bytes)
    gradient = stage(lambda t: t.gradient_bytes)
    in_turn = shape.zero_stage == 2 and shape.schedule == "gpipe"
    whole_gradient = two_ministages(lambda t: t.gradient_bytes) if in_turn else gradient
    reduced = gradient // shards if shards > 1 and shape.ministages > 1 else 0
    averages = 3 if model.dtype == "bfloat16" else 2

    own = of(longest, lambda t: t.input_bytes if shape.recompute else t.kept_bytes)
    whole = kept_bytes(model, shape, profile)
    kept = round(whole * in_flight) - own
    if shape.offload:
        kept = min(kept, own)
    boundary = _boundary_bytes(one, shape, in_flight, micro_batches)
    working = of(longest, lambda t: max(t.forward_peak_bytes, t.backward_peak_bytes))
    # the update comes when no micro-batch is held and no piece awaited
    updating = update_bytes(model, shape, micro_batches, profile)
    working = max(working, updating - kept - boundary)
    recomputed = of(longest, lambda t: t.kept_bytes - t.input_bytes) if shape.recompute else 0
    rows = shape.sequences * model.sequence_length
    return Memory(
        parameters=parameters,
        gradients=whole_gradient + reduced,
        optimizer=averages * gradient // shards,
        constants=one.constant_bytes,
        tokens=(int(shape.first) + int(shape.last)) * micro_batches * rows * 8,
        kept=kept,
        working=working,
        recomputed=recomputed,
        boundary=boundary,
        framework=SCALARS_BYTES,
    )


def update_bytes(
    model: Model, shape: StageShape, micro_batches: int, profile: ChipProfile | None = None
) -> int:
    """Most that the update holds, beside what stays: the last boundary tensors are leaving."""
    one, two = _traces(model, shape, profile)
    rest = shape.layers - 1

    def of(what: Callable[[StageTrace], int]) -> int:
        return what(one) + rest * (what(two) - what(one))

    shards = _shards(shape)
    # with one ministage the reduced gradient comes when no micro-batch is at work
    late = of(lambda t: t.gradient_bytes) // shards if shards > 1 and shape.ministages == 1 else 0
    leaving = min(SENDS_UNDER_WAY, micro_batches) * (one.input_bytes + _output_bytes(one, shape))
    return of(lambda t: t.update_peak_bytes) // shards + late + leaving


def _boundary_bytes(
    one: StageTrace, shape: StageShape, in_flight: float, micro_batches: int
) -> int:
    """Pieces awaited and tensors leaving while the most micro-batches are in flight.

    With GPipe and 1F1B that ends with the last forward's first backward, and the gradients leaving
    then are of the micro-batches not in flight. An activation leaves as a part of what its
    micro-batch keeps, unless that is recomputed.
    """
    in_order = shape.schedule in ("1f1b", "gpipe") and shape.ministages == 1
    before = max(0, math.ceil(micro_batches - in_flight)) if in_order else micro_batches
    output_bytes = _output_bytes(one, shape)
    awaited = output_bytes // shape.tp if micro_batches > 1 else 0
    if before > SENDS_UNDER_WAY:
        awaited += one.input_bytes // shape.tp
    leaving = one.input_bytes * min(SENDS_UNDER_WAY, before)
    if shape.recompute:
        leaving += output_bytes * min(SENDS_UNDER_WAY, micro_batches)
    return awaited + leaving


def _output_bytes(trace: StageTrace, shape: StageShape) -> int:
    return 0 if shape.last else trace.output_bytes


def _shards(shape: StageShape) -> int:
    return shape.dp if shape.zero_stage else 1


def kept_bytes(model: Model, shape: StageShape, profile: ChipProfile | None = None) -> int:
    """What the forward of a micro-batch keeps: with recomputing, each ministage's input alone.

    The model's first input is tokens, which the step holds.
    """
    one, two = _traces(model, shape, profile)
    if not shape.recompute:
        return one.kept_bytes + (shape.layers - 1) * (two.kept_bytes - one.kept_bytes)
    rows = shape.sequences * model.sequence_length
    return one.input_bytes + (shape.ministages - 1) * rows * model.hidden * model.dtype_bytes


def _traces(
    model: Model, shape: StageShape, profile: ChipProfile | None
) -> tuple[StageTrace, StageTrace]:
    """Of one layer and of two."""
    kind = shape.first, shape.last, shape.tp, shape.sequences
    traces = trace_stages(model, *kind)
    if profile is None or not profile.knows_memory(kind):
        return traces.one, traces.two
    return _measured(traces.one, 1, profile, kind), _measured(traces.two, 2, profile, kind)


def _measured(trace: StageTrace, layers: int, profile: ChipProfile, kind: Kind) -> StageTrace:
    return replace(
        trace,
        input_bytes=profile.bytes("kept_recompute_bytes", layers, kind),
        kept_bytes=profile.bytes("kept_bytes", layers, kind),
        forward_peak_bytes=0,  # the backward's peak is of both
        backward_peak_bytes=profile.bytes("working_bytes", layers, kind),
        update_peak_bytes=profile.bytes("update_bytes", layers, kind),
    )
