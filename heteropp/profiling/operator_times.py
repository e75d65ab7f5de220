"""Measures single operators on this process's chip, and how fast the host issues them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from heteropp.cost.tracing.kind import StageKind
from heteropp.cost.tracing.traces import trace_stage
from heteropp.description.profile import Block
from heteropp.models.spec import ModelSpec
from heteropp.profiling.blocks import REPEATS, ProfiledBlock, synchronize
from heteropp.profiling.operators import Operator
from heteropp.runtime.ranks.device import Device

RUNS = 10  # of an operator one after another, each time that a real chip is timed
AHEAD_S = 1e-3  # that the chip is kept busy, while the host issues those
SHORT = 64  # tokens of the block that tells the host's part


def operator_s(operator: Operator, device: Device) -> float:
    """Returns the seconds that the chip takes for an operator, once it has been issued.

    An emulated chip accounts for them itself; for a real one it is the median of REPEATS times.
    """
    import ditorch

    run = _prepared(operator, device)
    run()
    synchronize(device)
    if ditorch.is_emulated():
        ditorch.pacing_reset()
        run()
        synchronize(device)
        account = ditorch.pacing()
        assert account is not None
        return account.busy_s
    keep_busy = _busy(device)

    def once() -> float:
        keep_busy()  # a chip that waits for its host would be timed with it
        begin = device.clock.mark()
        for _ in range(RUNS):
            run()
        end = device.clock.mark()
        synchronize(device)
        return (device.clock.seconds(end) - device.clock.seconds(begin)) / RUNS

    return statistics.median(once() for _ in range(REPEATS))


def issuing_s(model: ModelSpec, device: Device) -> float:
    """Returns the seconds from one operator's start to the next one's, where the chip does not
    wait: of a block's forward and backward, as the host issues them.

    An emulated chip's host is held to the chip's time, and the CPU is its own host: 0 for these.
    """
    import ditorch

    if ditorch.is_emulated() or device.device.type == "cpu":
        return 0.0
    model = replace(model, sequence_length=min(SHORT, model.sequence_length))
    stage = ProfiledBlock(
        model, Block(chip="chip", tp=1, sequences=1, layers=1, first=False, last=False), device
    )
    kind = StageKind(model.block_kind(0), first=False, last=False, tp=1, sequences=1)
    traced = trace_stage(model, kind, 1)
    pieces = traced.forward, traced.backward_input, traced.backward_weight
    operators = sum(number for piece in pieces for number, *_ in piece.operators)

    def once() -> float:
        synchronize(device)
        begin_s = time.perf_counter()
        first_half, later = stage.backward()
        first_half()
        later.run()
        return time.perf_counter() - begin_s

    once()
    return statistics.median(once() for _ in range(REPEATS)) / operators


def _prepared(operator: Operator, device: Device) -> Callable[[], object]:
    """Returns what runs the operator, whose tensors are there."""
    dtype = getattr(torch, operator.dtype)

    def tensor(*shape: int) -> Tensor:
        # a GPU takes less power for values that are alike, and is a tenth faster with them
        return torch.randn(shape, dtype=dtype, device=device.device)

    if operator.kind == "move":
        one, other, result = (tensor(*operator.sides) for _ in range(3))
        return lambda: torch.add(one, other, out=result)
    count, m, n, k = operator.sides
    if operator.kind == "product":
        if count > 1:
            left, right, out = tensor(count, m, k), tensor(count, k, n), tensor(count, m, n)
            return lambda: torch.bmm(left, right, out=out)
        left, right, out = tensor(m, k), tensor(k, n), tensor(m, n)
        return lambda: torch.mm(left, right, out=out)
    query, key, value = (tensor(1, count, tokens, k).requires_grad_() for tokens in (m, n, n))

    def attention() -> Tensor:
        return scaled_dot_product_attention(query, key, value, is_causal=True)

    if operator.kind == "attention":
        return attention  # as training runs it, which keeps what its backward needs
    result, gradient = attention(), tensor(1, count, m, k)
    return lambda: torch.autograd.grad(result, (query, key, value), gradient, retain_graph=True)


@lru_cache(maxsize=1)
def _busy(device: Device) -> Callable[[], object]:
    """Returns what keeps a chip at work for at least AHEAD_S."""
    side = 128
    while True:
        side *= 2
        left = torch.full((side, side), 0.5, device=device.device)
        torch.mm(left, left)
        synchronize(device)
        begin_s = time.perf_counter()
        torch.mm(left, left)
        synchronize(device)
        if time.perf_counter() - begin_s >= AHEAD_S:
            return partial(torch.mm, left, left)
