"""Runs plain PyTorch on an emulated chip of another vendor, whose last bits differ from the CPU's.

DITORCH_CHIP=b-mini python examples/one_line.py
DITORCH_VENDOR=cpu python examples/one_line.py      the same program without a chip
"""

import torch

import ditorch  # the one line: from here on "device" is the chip of this process

torch.manual_seed(0)
x, weight = torch.randn(64, 512), torch.randn(512, 64, requires_grad=True)

here = x.to("device") @ weight.to("device")
here.square().mean().backward()
difference = (here.cpu() - x @ weight).abs().max().item()

print(f"{here.device}: chip {ditorch.chip().chip_type} of vendor {ditorch.chip().vendor}")
print(f"the product differs from the CPU's by at most {difference:.1e}")
assert weight.grad is not None
print(f"gradient of the weight: norm {weight.grad.norm().item():.4f}, on {weight.grad.device}")
