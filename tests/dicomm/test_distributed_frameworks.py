"""What frameworks build on torch.distributed, over dicomm: against one process, or Gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_processes
from torch import nn


def blocks(seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))


def batch(rank: int) -> torch.Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(rank))


def device_of(rank: int, chips: bool) -> str:
    if not chips:
        return "cpu"
    from test_distributed_device import start_chip

    return str(start_chip(rank)[0])


# ---------------------------------------------------------------- DDP and its options


class Branches(nn.Module):
    """Which of two layers takes part depends on the input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.shared = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        branch = self.first if data.sum() > 0 else self.second
        out: torch.Tensor = self.shared(branch(data))
        return out


def ddp_gradients(rank: int, device: str, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    found = []
    for unused, view, hook in ((True, False, False), (False, True, False), (False, True, True)):
        module = (Branches() if unused else blocks()).to(device)
        replica = nn.parallel.DistributedDataParallel(
            module, process_group=group, find_unused_parameters=unused, gradient_as_bucket_view=view
        )
        if hook:
            replica.register_comm_hook(group, default_hooks.fp16_compress_hook)
        for _ in range(2):  # the second time in buckets rebuilt by the first
            data = batch(rank).abs() * (1 if rank == 0 else -1)
            replica(data.to(device)).square().mean().backward()
        found += [p.grad.cpu() for p in replica.parameters() if p.grad is not None]
    return found


class Products(nn.Module):
    """Layers whose gradients have at most as high a rank as the batch has rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4)))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(data)
        return out


def check_power_sgd(rank: int, device: str) -> None:
    """Its callbacks sum twice more; of gradients of so low a rank it loses nothing."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    rows = torch.randn(2, 32, generator=torch.Generator().manual_seed(4))
    whole = Products()
    whole(rows).square().mean().backward()
    replica = nn.parallel.DistributedDataParallel(
        Products().to(device), bucket_cap_mb=32 * 32 * 4 / 2**20
    )
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        replica.zero_grad()
        replica(rows[rank : rank + 1].to(device)).square().mean().backward()
    assert state.compression_stats()[2] > 0  # it did compress
    for a, b in zip(replica.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-3, atol=1e-5)


# ---------------------------------------------------------------- FSDP2, tensor parallel, DCP


def sharded_training(rank: int, device: str, folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    def sharded() -> nn.Module:
        mesh = init_device_mesh(device, (2, 1), mesh_dim_names=("dp", "tp"))
        model = blocks().to(device)
        parallelize_module(model[0], mesh["tp"], {"0": ColwiseParallel()})
        for block in model:
            fully_shard(block, mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh["dp"])

    model, whole = sharded(), blocks()
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = torch.optim.SGD(whole.parameters(), lr=0.1)
    for _ in range(2):
        model(batch(rank).to(device)).square().mean().backward()
        whole(torch.cat([batch(0), batch(1)])).square().mean().backward()
        for optimizer in (mine, reference):
            optimizer.step()
            optimizer.zero_grad()

    def check(trained: nn.Module) -> None:
        for a, b in zip(trained.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(a.full_tensor().cpu(), b.detach(), rtol=1e-3, atol=1e-3)

    check(model)
    state = get_model_state_dict(model)
    dcp.save(state, checkpoint_id=f"{folder}/now")
    if device == "cpu":
        dcp.async_save(state, checkpoint_id=f"{folder}/later").result(60)
    for saved in ("now", "later") if device == "cpu" else ("now",):
        other = sharded()
        for parameter in other.parameters():
            nn.init.zeros_(parameter)
        state = get_model_state_dict(other)
        dcp.load(state, checkpoint_id=f"{folder}/{saved}")
        set_model_state_dict(other, state)
        check(other)


# ---------------------------------------------------------------- pipelining


def pipelined(rank: int, device: str) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    whole = blocks()
    half = whole[2 * rank : 2 * rank + 2].to(device)
    stage = PipelineStage(half, rank, 2, torch.device(device))
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda out, target: (out - target).square().mean())
    data, target = batch(5), batch(6)
    if rank == 0:
        schedule.step(data.to(device))
    else:
        schedule.step(target=target.to(device))
    got = [p.grad.cpu() for p in half.parameters()]
    reference = blocks()
    (reference(data) - target).square().mean().backward()
    for a, b in zip(got, list(reference.parameters())[4 * rank :], strict=False):
        torch.testing.assert_close(a, b.grad, rtol=1e-3, atol=1e-3)


def frameworks(rank: int, chips: bool, folder: str) -> None:
    device = device_of(rank, chips)
    gloo = dist.new_group(backend="gloo")
    ours, theirs = ddp_gradients(rank, device, None), ddp_gradients(rank, "cpu", gloo)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2 if chips else 0, atol=1e-3 if chips else 0)
    check_power_sgd(rank, device)
    pipelined(rank, device)
    sharded_training(rank, device, folder)


@pytest.mark.parametrize("chips", [False, True], ids=["host", "chips"])
def test_frameworks(chips: bool, tmp_path: Path) -> None:
    run_processes(2, frameworks, chips, str(tmp_path))
