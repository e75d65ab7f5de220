"""One small stage, run on the meta device: operators and tensors of forward, backward and update.

Needs torch; what comes of it is kept by traces.py, which does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from heteropp.cost.tracing.kind import PIECES, StageKind
from heteropp.cost.tracing.liveness import Liveness
from heteropp.cost.tracing.operators import (
    CountingContext,
    CountingExperts,
    CountingGroup,
    Trace,
    count,
)
from heteropp.description.hyperparameters import Hyperparameters
from heteropp.layout.flat_buffer import Experts
from heteropp.models.parallel.backward import WeightGradients, backward, put_off, same_storage
from heteropp.models.parallel.token_slices import TokenSlice
from heteropp.models.spec import ModelSpec
from heteropp.models.stage_module import StageModule
from heteropp.optimizer.adamw import clip
from heteropp.optimizer.zero import FlatParameters


@dataclass(frozen=True)
class Recording:
    """What one stage did, with one number of sequences in its micro-batch."""

    pieces: dict[str, Trace]  # by the names of PIECES
    sizes_bytes: dict[str, int]
    tensors_bytes: list[int]  # in order of birth; parameters, gradients and constants left out
    events: list[int]  # a tensor's index at its birth, the complement at its death
    spans: dict[str, tuple[int, int]]  # the events of forward, backwards and update


def record_stage(model: ModelSpec, layers: int, kind: StageKind) -> Recording:
    """Runs a stage of a few layers."""
    first, last = kind.first, kind.last
    model, span = model_around(model, layers, first, last, kind.block)
    group = CountingGroup(kind.tp, kind.sequence_parallel)
    dtype = getattr(torch, model.dtype)
    shares, tokens, context, part = kind.token_shares, model.sequence_length, None, None
    if shares is not None:
        tokens = shares[kind.cp_index]
        if kind.sliced:
            part = TokenSlice(tuple(pairwise((0, *accumulate(shares)))), kind.cp_index, {})
        else:
            context = CountingContext(group, shares, kind.cp_index)
    experts = None if kind.spread is None else CountingExperts(group, kind.spread)
    with torch.device("meta"):  # the module's tables too, which it makes on the host
        module = model.build(
            *(span, group, "meta", dtype),
            selective_recompute=kind.selective_recompute,
            context=context,
            experts=experts,
        )
    settings = Hyperparameters(optimizer=kind.optimizer)
    held: list[Experts] = ["all"] if experts is None else ["none", experts.parts[experts.index]]
    flats = [FlatParameters(module, None, 0, settings, each) for each in held]
    flat, of_experts = flats[0], flats[1:]
    rows = kind.sequences * tokens
    given = torch.empty(rows, dtype=torch.int64, device="meta")

    def entering() -> Tensor:
        """Returns the tokens, or an activation as the stage before sends one."""
        if first:
            return given
        own = rows // kind.tp if kind.sequence_parallel else rows
        return torch.empty(own, model.hidden, dtype=dtype, device="meta", requires_grad=True)

    def run(x: Tensor) -> Tensor:
        y: Tensor = module(x, given if last else None, part=part)
        return y / rows if last else y

    live = Liveness()
    between_slices: list[Tensor] = []
    if part is not None:  # what slices keep for each other is there before and after
        with torch.no_grad():
            run(entering())
        for kept in part.kept.values():
            assert kept.values is not None
            kept.gradients = torch.zeros_like(kept.values)
            between_slices += [kept.values, kept.gradients]
        for tensor in between_slices:
            live.ignore(tensor)
    for each in flats:
        assert each.gradients is not None
        averages = (each.optimizer.average, each.optimizer.average_square)
        for tensor in (each.values, each.gradients, each.master, *averages):
            live.ignore(tensor)
    for tensor in (*module.buffers(), given):
        live.ignore(tensor)
    pieces = {name: Trace() for name in PIECES}
    spans = {}

    def forward_and_input() -> dict[str, int]:
        """Traces the forward and the backward's first half; returns the ends' sizes in bytes.

        The first half ends with the input's gradient, which is sent before W computes the weights'.
        """
        with live:
            x = entering()
            group.trace = pieces["forward"]
            output = count(group.trace, lambda: run(x))
            spans["forward"] = (0, len(live.events))
        with live:
            gradient = None if last else torch.empty_like(output)
            group.trace = pieces["backward_input"]
            count(
                group.trace,
                lambda: backward(output, gradient),
                lambda tensor: (
                    (gradient is not None and same_storage(tensor, gradient)) or later.holds(tensor)
                ),
            )
        return {"input": 0 if first else _bytes(x), "output": _bytes(output)}

    with nullcontext(WeightGradients()) if kind.whole_backward else put_off() as later:
        ends_bytes = forward_and_input()
        put_off_bytes = later.bytes()
        spans["backward_input"] = (spans["forward"][1], len(live.events))
        with live:
            count(pieces["backward_weight"], later.run)
        spans["backward_weight"] = (spans["backward_input"][1], len(live.events))
    group.trace = parts = Trace()  # of what every rank has a part of, where rows are cut
    for each in flats:
        each.reduce()
    count(pieces["norm"], flat.norms)
    for each in of_experts:
        count(pieces["expert_norm"], each.norms)
    with live:
        begin = len(live.events)
        count(pieces["update"], lambda: update(flat))
        spans["update"] = (begin, len(live.events))
        for each in of_experts:
            count(pieces["expert_update"], partial(update, each))
        spans["expert_update"] = (spans["update"][1], len(live.events))
    group.trace = pieces["orthogonal"]
    with live:
        begin = len(live.events)
        count(group.trace, lambda: orthogonalise(flat))
        spans["orthogonal"] = (begin, len(live.events))
    sizes_bytes = ends_bytes | {
        "flat": sum(_bytes(each.values) for each in flats),
        "training": flat.layout.size * flat.values.element_size(),
        "gradient": _gradient_bytes([flat]),
        "expert_training": sum(_bytes(each.values) for each in of_experts),
        "expert_gradient": _gradient_bytes(of_experts),
        "constant": sum(_bytes(buffer) for buffer in module.buffers()),
        "put_off": put_off_bytes,
        "parts": sum(parts.all_reduce_bytes),
        "between_slices": sum(map(_bytes, between_slices)) // 2,
        "matrix": flat.layout.matrices * flat.master.element_size(),
        "matrices": len(flat.optimizer.muon.matrices) if flat.optimizer.muon else 0,
        # elsewhere than on meta, autograd holds two of a layer's gradients at once
        "second_gradient": _largest_of_a_block(module) if flat.mixed else 0,
    }
    # what the garbage collector finds comes to its end later, at any time
    events = live.events[: spans["orthogonal"][1]]
    return Recording(pieces, sizes_bytes, live.sizes_bytes, events, spans)


def model_around(
    model: ModelSpec, layers: int, first: bool, last: bool, block: str
) -> tuple[ModelSpec, tuple[int, int]]:
    """Returns a model that contains a stage of so many blocks, and the stage's [first, last).

    first, last: whether the stage is the model's first and last. block: the kind of the blocks.
    """
    start = 0 if first else 1
    return model.repeated(block, layers + (not first) + (not last)), (start, start + layers)


def update(flat: FlatParameters) -> None:
    """Runs all of an update that needs no other rank."""
    gradient = flat.reduced()
    clip(gradient, torch.empty((), device=gradient.device), 1.0)
    flat.optimizer.elementwise(gradient, 1e-3)
    flat.begin()


def orthogonalise(flat: FlatParameters) -> None:
    """Runs the rest of Muon's update, for which the ranks of a replica gather their matrices."""
    if flat.optimizer.muon is not None:
        flat.optimizer.muon.update(flat.reduced(), 1e-3)


def _gradient_bytes(flats: Sequence[FlatParameters]) -> int:
    return sum(_bytes(flat.gradients) for flat in flats if flat.gradients is not None)


def _largest_of_a_block(module: StageModule) -> int:
    named = module.named_parameters()
    sizes = (_bytes(p) for name, p in named if name.startswith("layers.") and p.requires_grad)
    return max(sizes, default=0)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
