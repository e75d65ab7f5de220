"""Trains with DistributedDataParallel over dicomm, each rank on the chip of another vendor.

torchrun --standalone --nproc-per-node 2 examples/data_parallel.py
"""

import os

RANK = int(os.environ["LOCAL_RANK"])
os.environ.setdefault("DITORCH_CHIP", ["b-mini", "d-mini"][RANK % 2])  # before ditorch opens it

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import dicomm.distributed  # noqa: E402, F401
import ditorch  # noqa: E402

dist.init_process_group("dicomm")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)).to("device")
replica = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(replica.parameters(), lr=1e-2)

for step in range(20):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(64, 16, generator=generator).chunk(dist.get_world_size())[dist.get_rank()]
    loss = nn.functional.mse_loss(replica(x.to("device")), x.sum(1, keepdim=True).to("device"))
    loss.backward()  # dicomm sums the gradients of the two vendors' chips
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    if dist.get_rank() == 0 and step % 5 == 4:
        print(f"step {step + 1}: loss {mean.item():.4f}", flush=True)

print(f"rank {dist.get_rank()} trained on a chip of vendor {ditorch.chip().vendor}", flush=True)
dist.destroy_process_group()
