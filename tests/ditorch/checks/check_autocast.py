"""Autocast to bfloat16."""

import torch
from torch import nn

import ditorch


def test_products_run_low_and_reductions_high() -> None:
    x = torch.randn(4, 4, device="device", requires_grad=True)
    layer = nn.Linear(4, 4, device="device")
    for name in ("device", ditorch.device.type):
        with torch.autocast(device_type=name):
            y = layer(x)
            assert y.dtype == torch.bfloat16
            assert (x @ x).dtype == torch.bfloat16
            assert torch.softmax(y, -1).dtype == torch.float32
            assert torch.cat([y, x]).dtype == torch.float32
        assert layer(x).dtype == torch.float32
    y.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32


def test_the_cpus_autocast_does_not_reach_the_chip() -> None:
    x = torch.randn(4, 4, device="device")
    with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.float32
        assert torch.equal(torch.cumsum(x, 0).cpu(), torch.cumsum(x.cpu(), 0))


def test_gradient_scaling() -> None:
    layer = nn.Linear(4, 1, device="device")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("device", init_scale=4.0)
    before = layer.weight.detach().clone()
    scaler.scale(layer(torch.ones(1, 4, device="device")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.allclose(layer.weight, before - 0.1)
