"""torch's fused Adam and AdamW are a kernel of the chip, and step as torch's loop does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ditorch

STEPS = 4
SHAPES = [(7, 5), (300,), (), (0, 3), (3, 4, 2)]
NAMES = {torch.optim.Adam: "_fused_adam_", torch.optim.AdamW: "_fused_adamw_"}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1, "amsgrad": True},
    {"weight_decay": 0.1, "maximize": True},
    {"betas": (0.0, 0.5), "eps": 1e-3},
    {"weight_decay": 0.2, "amsgrad": True, "maximize": True},
]


def drawn(seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES
    ]
    tensors[-1] = tensors[-1].permute(2, 0, 1)
    return tensors


def trained(
    kind: Any, dtype: torch.dtype, device: str, scale: float | None = None, **options: Any
) -> list[Tensor]:
    """Parameters, what the optimizer keeps of them and their last gradients, after some steps.

    scale: of gradients, which the optimizer is told of, as a GradScaler tells it; those of the
    second step are then infinite.
    """
    leaves = [each.to(device).requires_grad_() for each in drawn(0, dtype)]
    optimizer = kind(leaves, **{"lr": 3e-2, **options})
    for step in range(STEPS):
        is_infinite = scale is not None and step == 1
        for leaf, gradient in zip(leaves, drawn(step + 1, dtype), strict=True):
            given = gradient * (scale or 1) + (torch.inf if is_infinite else 0)
            leaf.grad = given.to(device)
        if scale is not None:
            optimizer.grad_scale = torch.tensor(scale, device=device)
            optimizer.found_inf = torch.tensor(float(is_infinite), device=device)
        optimizer.step()
    kept = [value for leaf in leaves for value in optimizer.state[leaf].values()]
    return [*leaves, *kept, *(leaf.grad for leaf in leaves)]


def close(ours: list[Tensor], theirs: list[Tensor], slack: float) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            one.detach().cpu().double(), other.detach().double(), rtol=slack, atol=slack
        )


def on_chip(kind: Any, dtype: torch.dtype, **options: Any) -> list[Tensor]:
    """Trains on the chip, whose kernel takes every step and whose host takes none."""
    ditorch.reset_fallback_counts()
    before = ditorch.kernel_counts().get(NAMES[kind], 0)
    found = trained(kind, dtype, "device", fused=True, **options)
    assert ditorch.kernel_counts()[NAMES[kind]] == before + STEPS
    assert NAMES[kind] not in ditorch.fallback_counts()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_steps_as_the_loop_does(options: dict[str, Any], kind: Any, dtype: torch.dtype) -> None:
    found = on_chip(kind, dtype, **options)
    slack = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    close(found, trained(kind, dtype, "cpu", foreach=False, **options), slack)
    close(found, trained(kind, dtype, "cpu", fused=True, **options), slack)


@pytest.mark.parametrize("kind", NAMES)
def test_its_rate_may_be_a_tensor(kind: Any) -> None:
    expected = trained(kind, torch.float32, "cpu", foreach=False, weight_decay=0.1)
    for device in ("cpu", "device"):
        rate = torch.tensor(3e-2, device=device)
        close(on_chip(kind, torch.float32, lr=rate, weight_decay=0.1), expected, 1e-5)


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_unscales_gradients_and_leaves_out_a_step(options: dict[str, Any], kind: Any) -> None:
    found = on_chip(kind, torch.float32, scale=1024.0, **options)
    theirs = trained(kind, torch.float32, "cpu", scale=1024.0, fused=True, **options)
    close(found, theirs, 1e-5)


def test_a_grad_scaler_drives_it() -> None:
    device = ditorch.device.type
    found: dict[str, list[float]] = {}
    for place in ("cpu", device):
        weight = torch.ones(4, device=place, requires_grad=True)
        optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
        scaler = torch.amp.GradScaler(place, init_scale=16.0)
        for factor in (1.0, torch.inf, 2.0):
            optimizer.zero_grad()
            scaler.scale((weight * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 8.0
        found[place] = weight.tolist()
    assert found[device] == pytest.approx(found["cpu"], rel=1e-6)
