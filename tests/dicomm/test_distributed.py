"""torch.distributed over dicomm, in real processes: against Gloo, and what frameworks build on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_processes
from torch import nn


def model(seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(),
                         nn.Linear(64, 8))  # fmt: skip


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(4, 16, generator=generator)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def serves_chips_that_torch_knows(rank: int) -> None:
    from dicomm._c10d import Backend

    group = dist.group.WORLD
    assert group is not None
    for device in ("cpu", "cuda", "xpu"):
        assert isinstance(group._get_backend(torch.device(device)), Backend)
    assert dist.Backend.default_device_backend_map["cuda"] == "nccl"


def test_a_group_serves_chips_that_torch_has_built_in() -> None:
    run_processes(1, serves_chips_that_torch_knows)


# ---------------------------------------------------------------- against Gloo


def every_collective(group: dist.ProcessGroup, rank: int, dtype: torch.dtype) -> list[Any]:
    """One of each through torch.distributed's functions; everything this rank ends with."""
    size = dist.get_world_size(group)

    def own(count: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rank + 10 * seed)
        return torch.randint(-8, 8, (count,), generator=generator).to(dtype)

    kept: list[Any] = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        kept.append(own(33))
        dist.all_reduce(kept[-1], op, group=group)
    for root in range(size):
        kept.append(own(9, root))
        dist.broadcast(kept[-1], root, group=group)
        reduced = own(9, root)
        dist.reduce(reduced, root, group=group)
        if rank == root:  # Gloo leaves partial sums on the others
            kept.append(reduced)
        gathered = [torch.empty_like(own(5)) for _ in range(size)] if rank == root else None
        dist.gather(own(5), gathered, root, group=group)
        kept.append(gathered)
        kept.append(torch.empty_like(own(4)))
        dealt = [own(4, peer) for peer in range(size)] if rank == root else None
        dist.scatter(kept[-1], dealt, root, group=group)
    kept.append([torch.empty_like(own(7)) for _ in range(size)])
    dist.all_gather(kept[-1], own(7), group=group)
    kept.append(torch.empty_like(own(7 * size)))
    dist.all_gather_into_tensor(kept[-1], own(7), group=group)
    kept.append(torch.empty_like(own(6)))
    dist.reduce_scatter_tensor(kept[-1], own(6 * size), group=group)
    kept.append(torch.empty_like(own(size * (rank + 1))))
    dist.all_to_all_single(
        kept[-1],
        own(size * (size + 1) // 2),
        [rank + 1] * size,
        [peer + 1 for peer in range(size)],
        group=group,
    )
    dist.barrier(group=group)
    return kept


def flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, list):
        return [tensor for item in value for tensor in flat(item)]
    return [] if value is None else [value]


def compare_with_gloo(rank: int) -> int:
    gloo = dist.new_group(backend="gloo")
    compared = 0
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8,
                  torch.int32, torch.int64, torch.uint8):  # fmt: skip
        ours = flat(every_collective(dist.group.WORLD, rank, dtype))
        theirs = flat(every_collective(gloo, rank, dtype))
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b), (dtype, a, b)  # small integers: every order is exact
            compared += 1
    return compared


def test_every_collective_equals_gloo() -> None:
    assert min(run_processes(3, compare_with_gloo)) > 100


# ---------------------------------------------------------------- messages and objects


def messages(rank: int) -> None:
    size = dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    sent = [torch.full((n,), float(rank)) for n in (0, 3, 300_000)]
    received = [torch.full((n,), -1.0) for n in (0, 3, 300_000)]
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, tensor, after) for tensor in sent]
        + [dist.P2POp(dist.irecv, tensor, before) for tensor in received]
    )
    for work in works:
        work.wait()
    assert all((tensor == before).all() for tensor in received)

    if rank == 0:  # tags tell messages apart, whatever the order of arrival
        dist.send(torch.tensor([1]), 1, tag=1)
        dist.send(torch.tensor([2]), 1, tag=2)
    if rank == 1:
        for tag in (2, 1):
            number = torch.tensor([0])
            dist.recv(number, 0, tag=tag)
            assert number.item() == tag

    if rank == 0:  # a send whose handle is dropped still arrives
        for step in range(3):
            dist.isend(torch.full((500_000,), float(step)), 1, tag=3)
    if rank == 1:
        time.sleep(0.2)
        for step in range(3):
            big = torch.empty(500_000)
            dist.recv(big, 0, tag=3)
            assert (big == step).all()

    if rank == 0:  # whoever sends first
        senders = set()
        for _ in range(size - 1):
            number = torch.tensor([-1])
            source = dist.recv(number, tag=9)
            assert number.item() == source
            senders.add(source)
        assert senders == set(range(1, size))
    else:
        dist.send(torch.tensor([rank]), 0, tag=9)


def objects(rank: int) -> None:
    size = dist.get_world_size()
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank, "text": "x" * 1000 * rank})
    assert [item["rank"] for item in found] == list(range(size))
    assert len(found[-1]["text"]) == 1000 * (size - 1)
    shared = ["plan", {"layers": 3}] if rank == 1 else [None, None]
    dist.broadcast_object_list(shared, src=1)
    assert shared == ["plan", {"layers": 3}]
    dealt: list[Any] = [None]
    dist.scatter_object_list(dealt, [f"to {r}" for r in range(size)] if rank == 0 else None, src=0)
    assert dealt == [f"to {rank}"]
    gathered: list[Any] | None = [None] * size if rank == 2 else None
    dist.gather_object(rank, gathered, dst=2)
    assert gathered in (None, list(range(size)))


def names_and_bytes(rank: int) -> None:
    import dicomm.distributed

    assert dist.get_backend() == "dicomm"
    peer = 1 - rank
    dist.barrier()
    before = dicomm.distributed.bytes_sent()[peer]
    if rank == 0:
        dist.send(torch.zeros(1000), 1)
    else:
        dist.recv(torch.zeros(1000), 0)
    dist.barrier()
    assert dicomm.distributed.bytes_sent()[peer] - before == (4000 if rank == 0 else 0)


def messages_and_objects(rank: int) -> None:
    messages(rank)
    objects(rank)


def test_messages_and_objects() -> None:
    run_processes(3, messages_and_objects)


def test_bytes_sent_counts_payload() -> None:
    run_processes(2, names_and_bytes)


# ---------------------------------------------------------------- groups


def subgroups(rank: int) -> None:
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    row, column = rows[rank // 2], columns[rank % 2]
    for step in range(20):  # all in flight at once
        values = [torch.full((n,), float(rank + step)) for n in (5, 60_000, 5)]
        works = [
            dist.all_reduce(values[0], group=row, async_op=True),
            dist.all_reduce(values[1], group=column, async_op=True),
            dist.all_reduce(values[2], async_op=True),
        ]
        for work in works[:: 1 if step % 2 else -1]:
            work.wait()
        partners = (rank ^ 1, rank ^ 2)
        assert (values[0] == rank + partners[0] + 2 * step).all()
        assert (values[1] == rank + partners[1] + 2 * step).all()
        assert (values[2] == 6 + 4 * step).all()
    number = torch.tensor([rank])
    if rank in (1, 3):  # global ranks in a group of another order
        dist.broadcast(number, src=3, group=column)
        assert number.item() == 3
    dist.destroy_process_group(row)
    dist.barrier()


def test_overlapping_groups_at_once() -> None:
    run_processes(4, subgroups)


# ---------------------------------------------------------------- frameworks


def train_ddp(rank: int, name: str) -> list[torch.Tensor]:
    group = dist.group.WORLD if name == "dicomm" else dist.new_group(backend=name)
    replica = nn.parallel.DistributedDataParallel(model(), process_group=group, bucket_cap_mb=0.01)
    optimizer = torch.optim.AdamW(replica.parameters(), lr=1e-2)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(replica(batch(rank, step))).backward()
        optimizer.step()
    return [p.detach().clone() for p in replica.module.parameters()]


def compare_ddp(rank: int) -> None:
    ours, theirs = train_ddp(rank, "dicomm"), train_ddp(rank, "gloo")
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)  # two ranks: a + b whoever adds
    assert not torch.equal(ours[0], next(model().parameters()))


def test_ddp_trains_as_over_gloo() -> None:
    run_processes(2, compare_ddp)


def tensor_parallel(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2,))
    whole, parallel = model(), model()
    parallelize_module(parallel, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    data = batch(7, 0)
    loss_of(whole(data)).backward()
    loss_of(parallel(data)).backward()
    for a, b in zip(whole.parameters(), parallel.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        full = b.grad.full_tensor() if hasattr(b.grad, "full_tensor") else b.grad
        torch.testing.assert_close(full, a.grad)
    table = torch.arange(12.0).view(4, 3)
    sharded = distribute_tensor(table, mesh, [Shard(0)])
    assert sharded.to_local().shape == (2, 3)
    assert torch.equal(sharded.redistribute(mesh, [Shard(1)]).full_tensor(), table)


def fully_sharded(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    sharded, whole = model(), model()
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    mine = torch.optim.SGD(sharded.parameters(), lr=0.1)
    reference = torch.optim.SGD(whole.parameters(), lr=0.1)
    for step in range(3):
        mine.zero_grad()
        reference.zero_grad()
        loss_of(sharded(batch(rank, step))).backward()
        loss_of(whole(torch.cat([batch(0, step), batch(1, step)]))).backward()
        mine.step()
        reference.step()
    for a, b in zip(sharded.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a.full_tensor(), b.detach())


def test_dtensor_tensor_parallel_linear() -> None:
    run_processes(2, tensor_parallel)


def test_fsdp2_trains_as_one_process() -> None:
    run_processes(2, fully_sharded)


# ---------------------------------------------------------------- paced links


def paced(rank: int) -> dict[str, tuple[float, float]]:
    """When this rank began and ended a message, a broadcast and an all-reduce; one clock."""
    import dicomm.distributed

    size = dist.get_world_size()
    dist.barrier()
    links = {peer: (0.05, 4e6) for peer in range(size) if peer != rank}
    dicomm.distributed.set_links(None, links)
    data = torch.ones(100_000)  # 0.1 s on the link
    times = {}

    def timed(name: str, operation: Callable[[], object]) -> None:
        dist.barrier()
        start = time.monotonic()
        operation()
        times[name] = (start, time.monotonic())

    def message() -> None:
        if rank == 0:
            dist.send(data, 1)
        elif rank == 1:
            dist.recv(data, 0)

    timed("message", message)
    timed("broadcast", lambda: dist.broadcast(data, 0))
    timed("all_reduce", lambda: dist.all_reduce(data))
    return times


def test_paced_links_hold_the_host_until_delivery() -> None:
    ranks = run_processes(3, paced)
    assert ranks[1]["message"][1] - ranks[0]["message"][0] >= 0.15
    root_start = ranks[0]["broadcast"][0]
    ends = sorted(times["broadcast"][1] for times in ranks[1:])
    assert ends[0] - root_start >= 0.15
    assert ends[1] - root_start >= 0.25  # one port: the second copy leaves after the first
    first_start = min(times["all_reduce"][0] for times in ranks)
    for times in ranks:  # two steps of two thirds of the data each
        assert times["all_reduce"][1] - first_start >= 2 * (0.05 + 2 / 3 * 0.1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(-1, "must not be negative"), (5, "not one of its peers")],
)
def test_impossible_links_are_refused(wrong: int, message: str) -> None:
    run_processes(2, refused_links, wrong, message)


def refused_links(rank: int, wrong: int, message: str) -> None:
    import dicomm.distributed

    links = {5: (0.0, 1.0)} if wrong == 5 else {1 - rank: (-1.0, 1.0)}
    with pytest.raises(ValueError, match=message):
        dicomm.distributed.set_links(None, links)
