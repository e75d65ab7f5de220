"""One small stage, traced: operators and bytes of its forward, backward and update."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from heteropp.hyperparameters import Hyperparameters
from heteropp.liveness import Liveness
from heteropp.llama import StageModule
from heteropp.model import Model
from heteropp.optimizer import clip
from heteropp.trace import CountingGroup, Trace, count
from heteropp.zero import FlatParameters


@dataclass(frozen=True)
class StageTrace:
    """Bytes are of one rank and one micro-batch, rounded as device allocators round."""

    forward: Trace
    backward: Trace
    norm: Trace  # of every parameter's gradient
    update: Trace  # clipping and AdamW over the whole buffer, and zeroing the gradients
    flat_bytes: int  # of the flat parameter buffer
    gradient_bytes: int  # of the flat gradient buffer
    constant_bytes: int
    input_bytes: int  # activations; tokens are held by the step, not by the micro-batch
    output_bytes: int  # activations; the loss of the last stage
    kept_bytes: int  # alive after a forward, its input included
    forward_peak_bytes: int  # most alive during a forward, beyond what stood before it
    backward_peak_bytes: int  # the same during a backward, what its forward kept included
    update_peak_bytes: int  # the same during the update


@lru_cache(maxsize=256)
def trace_stage(
    model: Model, layers: int, first: bool, last: bool, tp: int, sequences: int
) -> StageTrace:
    """Traces a stage of a few layers that embeds if `first` and ends in the loss if `last`."""
    # a model of which the stage is the first, last, both or neither part
    start = 0 if first else 1
    model = replace(model, layers=layers + (not first) + (not last))
    group = CountingGroup(tp)
    dtype = getattr(torch, model.dtype)
    module = StageModule(model, (start, start + layers), group, "meta", dtype)
    flat = FlatParameters(module, None, 0, Hyperparameters())
    rows = sequences * model.sequence_length
    tokens = torch.empty(rows, dtype=torch.int64, device="meta")

    live = Liveness()
    averages = (flat.optimizer.average, flat.optimizer.average_square)
    held = (flat.values, flat.gradients, flat.master, *averages, *module.buffers(), tokens)
    for tensor in held:
        live.ignore(tensor)
    forward, backward = Trace(), Trace()
    with live:
        x = tokens
        if not first:
            x = torch.empty(rows, model.hidden, dtype=dtype, device="meta", requires_grad=True)
        group.trace = forward
        live.restart_peak()
        output = count(forward, lambda: module(x, tokens) / rows if last else module(x))
        kept_bytes, forward_peak_bytes = live.live_bytes, live.peak_bytes
        group.trace = backward
        gradient = None if last else torch.empty_like(output)
        live.restart_peak()
        count(backward, lambda: torch.autograd.backward(output, gradient), gradient)
        backward_peak_bytes = live.peak_bytes
        if flat.mixed:  # elsewhere than on meta, autograd holds two of a layer's gradients at once
            backward_peak_bytes += max(_bytes(p) for p in module.layers.parameters())
    norm, update = Trace(), Trace()
    count(norm, lambda: flat.norms(0))
    with live:
        before_bytes = live.live_bytes
        live.restart_peak()
        count(update, lambda: _update(flat))
    return StageTrace(
        forward=forward,
        backward=backward,
        norm=norm,
        update=update,
        flat_bytes=_bytes(flat.values),
        gradient_bytes=_bytes(flat.gradients),
        constant_bytes=sum(_bytes(buffer) for buffer in module.buffers()),
        input_bytes=0 if first else _bytes(x),
        output_bytes=_bytes(output),
        kept_bytes=kept_bytes,
        forward_peak_bytes=forward_peak_bytes,
        backward_peak_bytes=backward_peak_bytes,
        update_peak_bytes=live.peak_bytes - before_bytes,
    )


def _update(flat: FlatParameters) -> None:
    clip(flat.shard_gradient, torch.empty((), device="meta"), 1.0)
    flat.optimizer.update(flat.shard_gradient, 1e-3)
    flat.zero_gradients()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
