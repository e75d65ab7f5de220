"""The paper's example: a script that says "device"."""

import torch

import ditorch  # noqa: F401

x = torch.randn(4, 4, device="device")
y = x + x
assert torch.equal(y.cpu(), 2 * x.cpu())
model = torch.nn.Linear(4, 4).to("device")
model(y).sum().backward()
print("unified name:", y.device.type)
