"""The cost of a stage: seconds and bytes, from chip files and the traced stage module.

A stage of n layers costs what one of 1 layer costs, plus n - 1 times the difference between 2
layers and 1; both are traced, once for each (first, last, tensor-parallel degree, sequences).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from ditorch.chips import ChipSpec
from heteropp.cluster import Link
from heteropp.model import Model
from heteropp.stage_trace import StageTrace, trace_stage
from heteropp.trace import Trace
from heteropp.transport import SENDS_UNDER_WAY

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


@dataclass(frozen=True, kw_only=True)
class Time:
    """Seconds of one rank: the first three for one micro-batch, the others for a step."""

    forward_s: float
    recompute_s: float
    backward_s: float
    reduce_s: float  # gradients over the replicas
    norm_s: float  # of its gradients, before the ranks exchange their norms
    update_s: float  # clip, AdamW, gather the parameters

    @property
    def micro_batch_s(self) -> float:
        """T_comp of section 4.3.2."""
        return self.forward_s + self.recompute_s + self.backward_s

    @property
    def step_s(self) -> float:
        """T_update of section 4.3.2: what of the update no backward covers, which is all of it."""
        return self.reduce_s + self.norm_s + self.update_s


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Peak bytes of one rank, by what they are for."""

    parameters: int
    gradients: int
    optimizer: int  # AdamW's two averages, and the master copy of a bfloat16 model
    constants: int  # causal mask, rotary angles, and a few scalars
    tokens: int  # of the whole step
    kept: int  # by the forwards of the micro-batches in flight, but for the one at work
    working: int  # the most that the micro-batch at work, or the update, holds
    boundary: int  # pieces received ahead, and tensors under way

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def all_reduce_s(size_bytes: float, ranks: int, link: Link) -> float:
    """dicomm's: everything to everyone when short, else a reduce-scatter and an all-gather."""
    if size_bytes > (64 << 10 if ranks == 2 else 16 << 10):
        return 2 * all_gather_s(size_bytes, ranks, link)
    if ranks <= 8:
        return all_gather_s(size_bytes * ranks, ranks, link)
    return math.ceil(math.log2(ranks)) * link.seconds(size_bytes)  # recursive doubling


def all_gather_s(size_bytes: float, ranks: int, link: Link) -> float:
    """Of `size_bytes` in all: each rank sends its piece to every other, one after another.

    A reduce-scatter costs the same.
    """
    return 0.0 if ranks == 1 else link.seconds(size_bytes * (ranks - 1) / ranks)


def stage_time(model: Model, shape: StageShape, chip: ChipSpec, inside: Link, across: Link) -> Time:
    """Predicted seconds. `inside` links a tensor-parallel group, `across` links the replicas."""
    one, two = (
        _short_stage_time(model, replace(shape, layers=layers), chip, inside, across)
        for layers in (1, 2)
    )
    more = shape.layers - 1

    def linear(name: str) -> float:
        return getattr(one, name) + more * (getattr(two, name) - getattr(one, name))

    return Time(**{field.name: linear(field.name) for field in fields(Time)})


@lru_cache(maxsize=65536)
def _short_stage_time(
    model: Model, shape: StageShape, chip: ChipSpec, inside: Link, across: Link
) -> Time:
    trace = trace_stage(model, shape.layers, shape.first, shape.last, shape.tp, shape.sequences)
    forward_s = _trace_s(trace.forward, model, shape.tp, chip, inside)
    shards = shape.dp if shape.zero_stage == 1 else 1
    combine = all_gather_s if shape.zero_stage == 1 else all_reduce_s
    return Time(
        forward_s=forward_s,
        recompute_s=forward_s if shape.recompute else 0.0,
        backward_s=_trace_s(trace.backward, model, shape.tp, chip, inside),
        reduce_s=combine(trace.gradient_bytes, shape.dp, across),
        norm_s=_update_s(trace.norm, model, chip, shards),
        update_s=_update_s(trace.update, model, chip, shards)
        + all_gather_s(trace.flat_bytes, shards, across),
    )


def stage_memory(model: Model, shape: StageShape, in_flight: int, micro_batches: int) -> Memory:
    """Predicted peak bytes of a rank that holds `in_flight` of the step's micro-batches at once."""

    def linear(of: Callable[[StageTrace], float]) -> int:
        return round(_linear(model, shape, of))

    one = trace_stage(model, 1, shape.first, shape.last, shape.tp, shape.sequences)
    kept = linear(lambda t: t.input_bytes if shape.recompute else t.kept_bytes)
    shards = shape.dp if shape.zero_stage == 1 else 1
    gradients = linear(lambda t: t.gradient_bytes)
    mixed = model.dtype == "bfloat16"
    rows = shape.sequences * model.sequence_length
    token_tables = int(shape.first) + int(shape.last)
    output_bytes = 0 if shape.last else one.output_bytes
    kept *= in_flight - 1
    working = linear(lambda t: max(t.forward_peak_bytes, t.backward_peak_bytes))
    updating = linear(lambda t: t.update_peak_bytes) // shards  # when nothing else is held
    return Memory(
        parameters=linear(lambda t: t.flat_bytes),
        gradients=gradients + (gradients // shards if shards > 1 else 0),
        optimizer=(3 if mixed else 2) * gradients // shards,
        constants=one.constant_bytes + SCALARS_BYTES,
        tokens=token_tables * micro_batches * rows * 8,
        kept=kept,
        working=max(working, updating - kept),
        # the pieces that come next, and what may still be leaving
        boundary=(one.input_bytes + output_bytes) // shape.tp
        + SENDS_UNDER_WAY * (one.input_bytes + output_bytes),
    )


def _linear(model: Model, shape: StageShape, of: Callable[[StageTrace], float]) -> float:
    one, two = (
        of(trace_stage(model, layers, shape.first, shape.last, shape.tp, shape.sequences))
        for layers in (1, 2)
    )
    return one + (shape.layers - 1) * (two - one)


def _trace_s(trace: Trace, model: Model, tp: int, chip: ChipSpec, inside: Link) -> float:
    return _operators_s(trace, model.dtype, chip, 1) + sum(
        all_reduce_s(size, tp, inside) for size in trace.all_reduce_bytes
    )


def _update_s(trace: Trace, model: Model, chip: ChipSpec, shards: int) -> float:
    dtype = "float32" if model.dtype == "bfloat16" else model.dtype
    return _operators_s(trace, dtype, chip, shards)


@lru_cache(maxsize=4096)
def _roofline_s(
    flops: float, moved_bytes: float, product: bool, dtype: str, chip: ChipSpec
) -> float:
    peak = chip.peak_flops(dtype) * (chip.compute.efficiency if product else 1.0)
    return chip.compute.launch_s + max(
        flops / peak, moved_bytes / chip.memory.bandwidth_bytes_per_s
    )


def _operators_s(trace: Trace, dtype: str, chip: ChipSpec, shards: int) -> float:
    return sum(
        _roofline_s(op.flops / shards, op.bytes / shards, op.product, dtype, chip)
        for op in trace.operators
    )
