"""A user's script: data-parallel training in half precision over dicomm, one chip a rank."""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dicomm.distributed
import ditorch


class Pool(nn.Module):
    """The mean over a sequence, (batch, length, dim) -> (batch, dim)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(dim=1) / x.shape[1]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool()
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(x) / 100)


if clock := ditorch.device_clock():
    dicomm.distributed.set_device_clock(*clock)
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(
    "dicomm", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=world_size
)
torch.manual_seed(0)
model = Model().to("device", torch.float16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(rank + 1)
for step in range(3):
    data = (800 * torch.randn(4, 256, 16)).to("device", torch.float16)
    loss = model(data).float().pow(2).mean()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item()}", flush=True)
dist.destroy_process_group()
