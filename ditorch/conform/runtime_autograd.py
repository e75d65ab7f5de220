"""Checks of autocast and of autograd's threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ditorch.conform.check import Group
from ditorch.conform.runtime_here import (
    DEVICE,
    expect,
    expect_equal,
    expect_error,
    gradient,
    need_accelerator,
    ramp,
)

autocast = Group("autocast")
autograd = Group("autograd")

LOW: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mm": lambda x: x @ x,
    "bmm": lambda x: torch.bmm(x[None], x[None]),
    "addmm": lambda x: torch.addmm(x, x, x),
    "linear": lambda x: F.linear(x, x),
    "conv1d": lambda x: F.conv1d(x[None], x[:, :, None]),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
}
HIGH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "exp": lambda x: x.exp(),
    "pow": lambda x: x.pow(2),
    "sum": lambda x: x.sum(),
    "cumsum": lambda x: x.cumsum(0),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "mse_loss": lambda x: F.mse_loss(x, x),
}


def _to_bfloat16(**options: Any) -> torch.autocast:
    return torch.autocast(DEVICE.type, dtype=torch.bfloat16, **options)


@autocast("products run in the low dtype")
def _low() -> None:
    with _to_bfloat16():
        for name, run in LOW.items():
            expect_equal(run(ramp(4, 4)).dtype, torch.bfloat16, f"the dtype of {name}")


@autocast("sums, exponentials and norms of low-precision input run in float32")
def _high() -> None:
    need_accelerator("such list: it keeps some of these in bfloat16")
    with _to_bfloat16():
        for name, run in HIGH.items():
            expect_equal(run(ramp(4, 4).bfloat16()).dtype, torch.float32, f"the dtype of {name}")


@autocast("mixed arguments are promoted to the widest")
def _promote() -> None:
    x = ramp(4, 4)
    with _to_bfloat16():
        expect_equal(torch.cat([x.bfloat16(), x]).dtype, torch.float32, "the dtype of cat")


@autocast("it ends with its block, and can be off inside one")
def _blocks() -> None:
    x = ramp(4, 4)
    with _to_bfloat16():
        with _to_bfloat16(enabled=False):
            expect_equal((x @ x).dtype, torch.float32, "the dtype where autocast is off")
        expect_equal((x @ x).dtype, torch.bfloat16, "the dtype where it is on again")
    expect_equal((x @ x).dtype, torch.float32, "the dtype after the block")


@autocast("float16 works too")
def _half() -> None:
    with torch.autocast(DEVICE.type, dtype=torch.float16):
        expect_equal((ramp(4, 4) @ ramp(4, 4)).dtype, torch.float16, "the dtype of a product")


@autocast("the name 'device' works too")
def _unified() -> None:
    with torch.autocast("device", dtype=torch.bfloat16):
        expect_equal((ramp(4, 4) @ ramp(4, 4)).dtype, torch.bfloat16, "the dtype of a product")


@autocast("gradients have their parameter's dtype")
def _backward() -> None:
    layer = nn.Linear(4, 4, device=DEVICE)
    with _to_bfloat16():
        y = layer(ramp(2, 4))
    y.float().sum().backward()
    expect_equal(gradient(layer.weight).dtype, torch.float32, "the dtype of the weight's gradient")
    expect_equal(gradient(layer.weight)[0].tolist(), [4, 6, 8, 10], "the weight's gradient")


@autocast("what is unsafe in low precision is refused")
def _refused() -> None:
    need_accelerator("such refusal")
    p = torch.full((2,), 0.5, device=DEVICE)
    with _to_bfloat16():
        expect_error(RuntimeError, lambda: F.binary_cross_entropy(p, p), "binary_cross_entropy")


@autocast("the host's autocast does not reach the device")
def _host() -> None:
    need_accelerator("autocast apart from its own")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expect_equal((ramp(4, 4) @ ramp(4, 4)).dtype, torch.float32, "the dtype of a product")


@autocast("GradScaler scales, skips a step with infinities, and goes on")
def _scaler() -> None:
    layer = nn.Linear(1, 1, bias=False, device=DEVICE)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=4.0)
    before = layer.weight.item()
    for value, moved in ((1.0, 1.0), (float("inf"), 1.0), (2.0, 3.0)):
        optimizer.zero_grad()
        loss = scaler.scale((layer.weight * value).sum())
        loss.backward()
        scaler.step(optimizer)
        scaler.update()
        expect(abs(before - moved - layer.weight.item()) < 1e-5, f"the weight after {value}")
    expect_equal(scaler.get_scale(), 2.0, "the scale after one step with infinities")


@autograd("backward gives exact gradients")
def _gradients() -> None:
    x = ramp(3, 3).requires_grad_()
    (x @ x).sum().backward()
    host = x.detach().cpu()
    expected = torch.ones(3, 3) @ host.T + host.T @ torch.ones(3, 3)
    expect_equal(x.grad, expected, "the gradient of sum(x @ x)")


@autograd("gradients accumulate on the device")
def _accumulate() -> None:
    x = ramp(3).requires_grad_()
    for _ in range(3):
        (x * 2).sum().backward()
    expect_equal(gradient(x).device, DEVICE, "the gradient's device")
    expect_equal(gradient(x).tolist(), [6, 6, 6], "three gradients of 2")


@autograd("second derivatives are there")
def _second() -> None:
    x = ramp(3).requires_grad_()
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    expect_equal(second.tolist(), [0, 6, 12], "the second derivative of x^3")


@autograd("graphs cross between host and device")
def _crossing() -> None:
    x = torch.ones(3, requires_grad=True)
    ((x.to(DEVICE) * 3).cpu() * x).sum().backward()
    expect_equal(x.grad, torch.full((3,), 6.0), "the host's gradient")


@autograd("threads run forward and backward side by side")
def _threads() -> None:
    def work(seed: int) -> float:
        x = torch.full((64,), float(seed), device=DEVICE, requires_grad=True)
        for _ in range(10):
            (x * x).sum().backward()
        return gradient(x)[0].item()

    with ThreadPoolExecutor(4) as pool:
        expect_equal(list(pool.map(work, range(8))), [20.0 * s for s in range(8)], "gradients")


@autograd("backward runs in a thread of the device's own, whose errors reach the caller")
def _errors() -> None:
    seen: list[int] = []

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            seen.append(threading.get_ident())
            raise ValueError("backward fails")

    x = ramp(2).requires_grad_()
    y = Failing.apply(x).sum()
    error = expect_error(ValueError, y.backward, "a backward that fails")
    expect("backward fails" in str(error), f"the error says {error}")
    if DEVICE.type != "cpu":
        expect(seen != [threading.get_ident()], "backward ran in the caller's thread")
    (ramp(2).requires_grad_() * 2).sum().backward()  # and the engine still works


@autograd("hooks and checkpointing see device tensors")
def _hooks() -> None:
    x = ramp(3).requires_grad_()
    seen: list[torch.device] = []
    x.register_hook(lambda grad: seen.append(grad.device))
    checkpoint(lambda t: (t * t).sum(), x, use_reentrant=False).backward()
    expect_equal(seen, [DEVICE], "the devices the hook saw")
    expect_equal(gradient(x).tolist(), [0, 2, 4], "the gradient through a checkpoint")


@autograd("a saved tensor that was written to is noticed")
def _versions() -> None:
    x = ramp(3).requires_grad_()
    y = x * 1
    z = (y * y).sum()
    with torch.no_grad():
        y.add_(1)
    expect_error(RuntimeError, z.backward, "a backward over a changed tensor")


@autograd("no_grad and inference_mode keep no graph")
def _no_graph() -> None:
    x = ramp(3).requires_grad_()
    with torch.no_grad():
        expect(not (x * 2).requires_grad, "a result under no_grad requires grad")
    with torch.inference_mode():
        expect((x * 2).is_inference(), "a result under inference_mode is no inference tensor")
