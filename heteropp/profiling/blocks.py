"""Measures a block of a model's layers on this process's chip."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from heteropp.cost.tracing.operators import CountingGroup
from heteropp.cost.tracing.stage import model_around, update
from heteropp.description.hyperparameters import Hyperparameters
from heteropp.description.profile import Block, Measured
from heteropp.models.parallel.backward import WeightGradients, put_off
from heteropp.models.spec import ModelSpec
from heteropp.optimizer.zero import FlatParameters
from heteropp.runtime.ranks.device import Device

REPEATS = 5  # of what a real chip is timed at, after one that warms it up
SETTLING_S = 5  # at most
QUIET_S = 0.05  # without a change, and what is held is not autograd's


class ProfiledBlock:
    """A block on the device, with a group that communicates nothing."""

    def __init__(self, model: ModelSpec, block: Block, device: Device) -> None:
        self.block, self.device = block, device
        model, span = model_around(
            model, block.layers, block.first, block.last, model.block_kind(0)
        )
        dtype = getattr(torch, model.dtype)
        group = CountingGroup(block.tp)
        self.module = model.build(span, group, device.device, dtype)
        for parameter in self.module.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        self.flat = FlatParameters(self.module, None, 0, Hyperparameters())
        self.flat.reduce()  # nothing to sum: what follows the backward may be measured alone
        self.rows = block.sequences * model.sequence_length
        # a GPU takes less power for values that are alike, and is a tenth faster with them
        random = torch.Generator().manual_seed(0)
        tokens = torch.randint(model.vocab, (self.rows,), generator=random)
        self.tokens = tokens.to(device.device)
        self.values = torch.randn(self.rows, model.hidden, generator=random).to(
            device.device, dtype
        )

    def input(self) -> Tensor:
        return self.tokens if self.block.first else self.values.clone().requires_grad_()

    def forward(self, x: Tensor) -> Tensor:
        if self.block.last:
            return self.module(x, self.tokens) / self.rows
        return self.module(x)

    def backward(self) -> tuple[Callable[[], object], WeightGradients]:
        """Runs a forward; returns what runs the first half of its backward, and the second half.

        The second half is the weight gradients that the first puts off.
        """
        with put_off() as later:
            output = self.forward(self.input())
        gradient = self.gradient()
        return lambda: later.backward(output, gradient), later

    def gradient(self) -> Tensor | None:
        return None if self.block.last else self.values.clone()


def measure(model: ModelSpec, block: Block, device: Device) -> Measured:
    _settle(device, 0)
    before = _allocated(device)
    stage = ProfiledBlock(model, block, device)
    flat = stage.flat
    memory = _memory(stage, before)

    def forward() -> Callable[[], object]:
        x = stage.input()
        return lambda: stage.forward(x)

    def forward_that_keeps_nothing() -> Callable[[], object]:
        x = stage.input()

        def run() -> None:
            with torch.no_grad():
                stage.forward(x)

        return run

    def input_gradient() -> Callable[[], object]:
        return stage.backward()[0]

    def weight_gradients() -> Callable[[], object]:
        first_half, later = stage.backward()
        first_half()
        return later.run

    return Measured(
        block=block,
        forward_s=_seconds(device, forward),
        recompute_s=_seconds(device, forward_that_keeps_nothing),
        backward_input_s=_seconds(device, input_gradient),
        backward_weight_s=_seconds(device, weight_gradients),
        norm_s=_seconds(device, lambda: flat.norms),
        update_s=_seconds(device, lambda: lambda: update(flat)),
        **memory,
    )


def _seconds(device: Device, prepare: Callable[[], Callable[[], object]]) -> float:
    """Returns the seconds that the device takes for the work that `prepare` returns.

    An emulated chip accounts for them itself; for a real one it is the median of REPEATS runs.
    """
    import ditorch

    def once() -> float:
        run = prepare()
        synchronize(device)
        if ditorch.is_emulated():
            ditorch.pacing_reset()
            run()
            synchronize(device)
            account = ditorch.pacing()
            assert account is not None
            return account.busy_s
        begin = device.clock.mark()
        run()
        end = device.clock.mark()
        synchronize(device)
        return device.clock.seconds(end) - device.clock.seconds(begin)

    if ditorch.is_emulated():
        return once()
    once()
    return statistics.median(once() for _ in range(REPEATS))


def synchronize(device: Device) -> None:
    if device.device.type != "cpu":
        torch.accelerator.synchronize()


def _memory(stage: ProfiledBlock, before: int) -> dict[str, int | None]:
    """Returns the bytes that a stage needs beyond parameters, gradients, averages and constants.

    before: the bytes that were allocated when the stage was not there, which are libraries'.
    """
    if stage.device.device.type == "cpu":
        names = ("kept_bytes", "kept_recompute_bytes", "working_bytes", "update_bytes")
        return dict.fromkeys(names)

    own = _allocated(stage.device) - before
    _run_once(stage)
    held = _allocated(stage.device)
    torch.accelerator.reset_peak_memory_stats()
    x = stage.input()
    with torch.no_grad():
        output = stage.forward(x)
    del output
    kept_recompute = _allocated(stage.device) - held
    with put_off() as later:
        output = stage.forward(x)
    kept = _allocated(stage.device) - held
    gradient = stage.gradient()
    later.backward(output, gradient)
    later.run()
    working = _most(stage.device) - held
    del x, output, gradient
    _settle(stage.device, held)
    torch.accelerator.reset_peak_memory_stats()
    update(stage.flat)
    return {
        "kept_bytes": kept,
        "kept_recompute_bytes": kept_recompute,
        "working_bytes": working,
        "update_bytes": _most(stage.device) - held,
        "library_bytes": held - own,
    }


def _run_once(stage: ProfiledBlock) -> None:
    """A real chip's libraries take memory of their own, for good, when they are first used."""
    import ditorch

    if not ditorch.is_emulated():
        held = _allocated(stage.device)
        first_half, later = stage.backward()
        first_half()
        later.run()
        del first_half, later
        _settle(stage.device, held)


def _allocated(device: Device) -> int:
    if device.device.type == "cpu":
        return 0
    synchronize(device)
    return torch.accelerator.memory_allocated()


def _most(device: Device) -> int:
    synchronize(device)
    return torch.accelerator.max_memory_allocated()


def _settle(device: Device, held_bytes: int) -> None:
    """Waits for autograd's own thread to let go of what it worked on, so that no more is held.

    What stays held on a real chip, without a change for a while, is a library's own, such as
    cuBLAS's workspace.
    """
    import ditorch

    if device.device.type == "cpu":
        return
    patience_s = SETTLING_S if ditorch.is_emulated() else QUIET_S
    deadline_s = quiet_s = time.monotonic() + SETTLING_S
    before = None
    while (held := _allocated(device)) > held_bytes and time.monotonic() < min(deadline_s, quiet_s):
        if held != before:
            before, quiet_s = held, time.monotonic() + patience_s
        time.sleep(0.001)
