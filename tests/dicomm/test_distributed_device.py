"""dicomm on emulated chips of two vendors: both strategies, and clocks that travel with data."""

from __future__ import annotations

import ctypes
import itertools
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_processes
from sampled import sampled
from torch import nn

STRATEGIES = ["device-direct", "cpu-mediated"]


def start_chip(rank: int) -> Any:
    """An emulated chip of this rank's own vendor, its clock shared with dicomm."""
    os.environ["DITORCH_CHIP"] = ["a-mini", "b-mini"][rank % 2]
    import dicomm.distributed
    import ditorch

    clock = ditorch.device_clock()
    assert clock is not None
    dicomm.distributed.set_device_clock(*clock)
    return clock


def collectives_on_chips(rank: int) -> None:
    device = start_chip(rank)[0]
    size = dist.get_world_size()
    for count in (0, 5, 70_000):
        total = torch.full((count,), rank + 1.0, device=device)
        dist.all_reduce(total)
        assert total.device.type == device and (total.cpu() == size * (size + 1) / 2).all()
        work = dist.all_reduce(total, async_op=True)
        work.get_future().wait()
        work.wait()
        assert (total.cpu() == size * size * (size + 1) / 2).all()
        copy = torch.full((count, 2), float(rank), device=device).t()  # not contiguous
        dist.broadcast(copy, src=1)
        assert (copy.cpu() == 1).all()
        whole = torch.empty(count * size, device=device)
        dist.all_gather_into_tensor(whole, torch.full((count,), float(rank), device=device))
        expected = torch.arange(float(size)).repeat_interleave(count)
        assert torch.equal(whole.cpu(), expected)
        part = torch.empty(count, device=device)
        dist.reduce_scatter_tensor(part, whole)
        assert (part.cpu() == size * rank).all()
        if rank == 0:
            dist.send(copy, 1)
        elif rank == 1:
            target = torch.zeros(count, 2, device=device).t()
            dist.recv(target, 0)
            assert (target.cpu() == 1).all()
    host = torch.ones(3)  # host tensors go over the same group
    dist.all_reduce(host)
    assert (host == size).all()
    dist.barrier()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_collectives_between_two_vendors(strategy: str) -> None:
    run_processes(2, collectives_on_chips, environment={"DICOMM_STRATEGY": strategy})


def train_on_chips(rank: int) -> None:
    check_data_parallel(rank, start_chip(rank)[0])


def check_data_parallel(rank: int, device: str) -> None:
    def train(target: str, wrap: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(target)
        replica = nn.parallel.DistributedDataParallel(model) if wrap else model
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            data = torch.randn(4, 8, generator=generator).to(target)
            mine = data.chunk(2)[rank] if wrap else data
            optimizer.zero_grad()
            replica(mine).square().mean().backward()
            optimizer.step()
        return [p.detach().cpu() for p in model.parameters()]

    for a, b in zip(train(device, True), train("cpu", False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)  # two vendors' last bits differ


@pytest.mark.parametrize("strategy", sampled(STRATEGIES, 1, everyday=1))
def test_ddp_across_two_vendors(strategy: str) -> None:
    run_processes(2, train_on_chips, environment={"DICOMM_STRATEGY": strategy})


def sharded_on_chips(rank: int) -> None:
    check_sharded(start_chip(rank)[0])


def check_sharded(device: str) -> None:
    """FSDP2, then DTensor's tensor parallelism, against the same model on the host."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh(device, (2,))

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    host, sharded, parallel = model(), model().to(device), model().to(device)
    fully_shard(sharded[0], mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    parallelize_module(parallel, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    data = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    losses = [m(data.to(d)).square().mean() for m, d in
              ((host, "cpu"), (sharded, device), (parallel, device))]  # fmt: skip
    for loss in losses:
        loss.backward()
        torch.testing.assert_close(loss.detach().cpu(), losses[0].detach(), rtol=1e-3, atol=1e-4)
    for other in (sharded, parallel):
        for a, b in zip(other.parameters(), host.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None
            whole = a.grad.full_tensor() if hasattr(a.grad, "full_tensor") else a.grad
            torch.testing.assert_close(whole.cpu(), b.grad, rtol=1e-3, atol=1e-4)


def test_fsdp2_and_tensor_parallelism_across_two_vendors() -> None:
    run_processes(2, sharded_on_chips)


LATENCY_S = 1.0


def delayed(rank: int) -> list[tuple[float, float, float]]:
    """Start, when the host came back, and when the chip's clock says the data is there."""
    import dicomm.distributed

    device, ready_at_ns, _ = start_chip(rank)
    clock = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int32)(ready_at_ns)
    tensor = torch.ones(1000, device=device)
    dist.all_reduce(tensor)  # connected
    dicomm.distributed.set_links(None, {1 - rank: (LATENCY_S, 1e9)})

    def message() -> None:
        if rank == 0:
            dist.isend(tensor, 1).wait()
        else:
            dist.recv(tensor, 0)

    found = []
    for operation in (
        message,
        lambda: dist.all_reduce(tensor),
        lambda: dist.all_reduce(tensor, async_op=True).get_future().wait(),
    ):
        dist.barrier()
        torch.accelerator.synchronize()
        start = time.monotonic()
        operation()
        back = time.monotonic()
        ready = clock(0) / 1e9
        tensor.cpu()
        assert time.monotonic() >= ready  # reading back does hold the host
        found.append((start, back, ready))
    return found


def test_the_chip_waits_for_the_link_and_the_host_runs_ahead() -> None:
    sender, receiver = run_processes(2, delayed)
    for (sent, _, _), (_, back, ready) in zip(sender, receiver, strict=True):
        assert ready >= sent + LATENCY_S
        assert back < ready  # the host went on before the data was there


def late_sender(rank: int) -> float:
    """A message leaves when its sender's chip has computed it, even if no link is paced."""
    device, ready_at_ns, _ = start_chip(rank)
    clock = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int32)(ready_at_ns)
    tensor = torch.ones(1000, 1000, device=device)
    dist.all_reduce(tensor)
    if rank == 0:
        for _ in range(10):
            tensor = tensor @ tensor * 1e-3
        ready = clock(0) / 1e9
        dist.send(tensor, 1)
        return ready
    dist.recv(tensor, 0)
    return clock(0) / 1e9


@pytest.mark.long
def test_clocks_travel_over_links_that_are_not_paced() -> None:
    computed_at, received_at = run_processes(2, late_sender)
    assert received_at >= computed_at


def large_messages(rank: int, on_host: int | None) -> None:
    """Chip memory that goes through the host in chunks, whichever side needs that.

    on_host: the rank whose tensors are the host's, if any.
    """
    import dicomm.distributed

    device, peer = start_chip(rank)[0], 1 - rank
    if rank == on_host:
        device = "cpu"
    first, second = ((torch.arange(5 * 2**20 + 3) * 7 + step).to(torch.uint8) for step in (0, 1))
    for strategies in itertools.product(STRATEGIES, repeat=2):
        options = dicomm.distributed.Options(strategy=strategies[rank])
        group = dist.new_group(pg_options=options)
        sent = [first.to(device), second.to(device)]
        got = [torch.zeros_like(tensor) for tensor in sent]
        works = [dist.isend(tensor, peer, group=group) for tensor in sent]
        works += [dist.irecv(tensor, peer, group=group) for tensor in got]  # two of one tag
        for work in works:
            work.wait()
        assert torch.equal(got[0].cpu(), first) and torch.equal(got[1].cpu(), second)
        if rank == 0:
            dist.send(sent[0][:-3].view(1024, -1).t(), 1, group=group)  # not contiguous
            dist.isend(sent[1], 1, group=group)  # a work nobody keeps
        else:
            target = torch.zeros(1024, 5 * 1024, dtype=torch.uint8, device=device).t()
            dist.recv(target, 0, group=group)
            assert torch.equal(target.cpu(), first[:-3].view(1024, -1).t())
            got[0].zero_()
            assert dist.recv(got[0], group=group) == 0  # from whoever sends
            assert torch.equal(got[0].cpu(), second)
        dist.barrier(group)
        dist.destroy_process_group(group)


@pytest.mark.parametrize("on_host", sampled([0, 1, None], 1, everyday=2))
def test_large_chip_tensors_between_both_strategies(on_host: int | None) -> None:
    run_processes(2, large_messages, on_host)
