"""One small stage, run on the meta device: operators and tensors of forward, backward and update.

Needs torch; what comes of it is kept by traces.py, which does not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from heteropp.hyperparameters import Hyperparameters
from heteropp.model import Model
from heteropp.tracing.liveness import Liveness
from heteropp.tracing.operators import CountingGroup, Trace, count
from heteropp.training.llama import StageModule
from heteropp.training.optimizer import clip
from heteropp.training.zero import FlatParameters


@dataclass(frozen=True)
class Recording:
    """What one stage did, with one number of sequences in its micro-batch."""

    pieces: dict[str, Trace]  # forward, backward, input gradients (of the backward), norm, update
    sizes_bytes: dict[str, int]
    tensors_bytes: list[int]  # in order of birth; parameters, gradients and constants left out
    events: list[int]  # a tensor's index at its birth, the complement at its death
    spans: dict[str, tuple[int, int]]  # the events of forward, backward and update


def record_stage(
    model: Model, layers: int, first: bool, last: bool, tp: int, sequences: int
) -> Recording:
    """Runs a stage of a few layers that embeds if `first` and ends in the loss if `last`."""
    model, span = model_around(model, layers, first, last)
    group = CountingGroup(tp)
    dtype = getattr(torch, model.dtype)
    with torch.device("meta"):  # the module's tables too, which it makes on the host
        module = StageModule(model, span, group, "meta", dtype)
    flat = FlatParameters(module, None, 0, Hyperparameters())
    rows = sequences * model.sequence_length
    tokens = torch.empty(rows, dtype=torch.int64, device="meta")
    entered: list[Tensor] = []  # the activations that the first layer is given
    if first:
        module.embedding.register_forward_hook(lambda _, args, output: entered.append(output))

    live = Liveness()
    averages = (flat.optimizer.average, flat.optimizer.average_square)
    for tensor in (flat.values, flat.gradients, flat.master, *averages, *module.buffers(), tokens):
        live.ignore(tensor)
    pieces = {name: Trace() for name in ("forward", "backward", "input", "norm", "update")}
    spans = {}
    with live:
        x = tokens
        if not first:
            x = torch.empty(rows, model.hidden, dtype=dtype, device="meta", requires_grad=True)
            entered.append(x)
        group.trace = pieces["forward"]
        output = count(group.trace, lambda: module(x, tokens) / rows if last else module(x))
        spans["forward"] = (0, len(live.events))
    gradient = None if last else torch.empty_like(output)
    # the part of the backward that the stage before waits for, on a graph that stays
    group.trace = pieces["input"]
    count(
        group.trace,
        lambda: torch.autograd.grad(output, entered, gradient, retain_graph=True),
        gradient,
    )
    with live:
        gradient = None if last else torch.empty_like(output)
        group.trace = pieces["backward"]
        count(group.trace, lambda: torch.autograd.backward(output, gradient), gradient)
        spans["backward"] = (spans["forward"][1], len(live.events))
    count(pieces["norm"], lambda: flat.norms(0))
    with live:
        begin = len(live.events)
        count(pieces["update"], lambda: update(flat))
        spans["update"] = (begin, len(live.events))
    sizes_bytes = {
        "flat": _bytes(flat.values),
        "gradient": _bytes(flat.gradients),
        "constant": sum(_bytes(buffer) for buffer in module.buffers()),
        "input": 0 if first else _bytes(x),
        "output": _bytes(output),
        # elsewhere than on meta, autograd holds two of a layer's gradients at once
        "second_gradient": max(map(_bytes, module.layers.parameters())) if flat.mixed else 0,
    }
    return Recording(pieces, sizes_bytes, live.sizes_bytes, live.events, spans)


def model_around(
    model: Model, layers: int, first: bool, last: bool
) -> tuple[Model, tuple[int, int]]:
    """A model of which the layers are the first, last, both or neither part; and which they are."""
    start = 0 if first else 1
    return replace(model, layers=layers + (not first) + (not last)), (start, start + layers)


def update(flat: FlatParameters) -> None:
    """All of an update that needs no other rank."""
    clip(flat.shard_gradient, torch.empty((), device=flat.gradients.device), 1.0)
    flat.optimizer.update(flat.shard_gradient, 1e-3)
    flat.zero_gradients()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
