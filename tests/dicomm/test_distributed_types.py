"""What torch.distributed allows, over dicomm: element types, layouts, works, groups, refusals."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import Processes, run_processes

import dicomm.distributed

SIZE = 2


MOVED = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
    torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def of_type(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    size = torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, 60, (count * size,), dtype=torch.uint8, generator=generator).view(dtype)


def every_type_moves(rank: int) -> None:
    peer = 1 - rank
    for seed, dtype in enumerate(MOVED):
        mine, theirs = of_type(dtype, 6, 2 * seed + rank), of_type(dtype, 6, 2 * seed + peer)
        got = torch.zeros_like(mine)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, got, peer)]
        ):
            work.wait()
        assert torch.equal(raw(got), raw(theirs)), dtype
        both = [torch.zeros_like(mine) for _ in range(SIZE)]
        dist.all_gather(both, mine)
        assert torch.equal(raw(both[peer]), raw(theirs)), dtype
        swapped = torch.zeros_like(mine)
        dist.all_to_all_single(swapped, mine)
        whole = [of_type(dtype, 6, 2 * seed + r) for r in range(SIZE)]
        assert torch.equal(raw(swapped), raw(torch.cat([w.chunk(2)[rank] for w in whole]))), dtype


def complex_and_views(rank: int) -> None:
    values = [torch.complex(torch.arange(5.0) + r, torch.arange(5.0) * (r + 1)) for r in range(2)]
    total = values[rank].clone()
    dist.all_reduce(total)
    assert torch.equal(total, values[0] + values[1])
    part = torch.empty(5, dtype=torch.complex64)
    dist.reduce_scatter_tensor(part, torch.cat([values[rank], values[rank] * 2]))
    assert torch.equal(part, (values[0] + values[1]) * (rank + 1))
    strided = torch.zeros(4, 6).t()[::2]
    strided += rank + 1
    dist.all_reduce(strided)
    assert (strided == 3).all()
    channels_last = torch.full((2, 3, 4, 4), float(rank)).to(memory_format=torch.channels_last)
    dist.broadcast(channels_last, 1)
    assert (channels_last == 1).all()
    negative = torch._neg_view(torch.full((10,), -1.0 - rank))  # its memory has the other sign
    total = torch.empty(5)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend._reduce_scatter_base(total, negative).wait()
    assert (total == 3).all()
    backend.broadcast(negative, 1).wait()
    assert (negative == 2).all()


def works(rank: int) -> None:
    tensor = torch.full((5,), rank + 1.0)
    work = dist.all_reduce(tensor, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    assert torch.equal(doubled.wait(), torch.full((5,), 6.0))
    assert work.is_completed() and work.is_success()
    tensors = [torch.full((3,), rank + 1.0), torch.full((2,), rank + 1, dtype=torch.int64)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for each in tensors:
            dist.all_reduce(each)
    manager.wait()
    assert (tensors[0] == 3).all() and (tensors[1] == 3).all()
    if rank == 0:
        request = dist.irecv(torch.zeros(1), 1, tag=5)
        assert not request.is_completed()
        started = time.monotonic()
        with pytest.raises(dist.DistBackendError, match=r"recv.*Timed out.*rank 1.*tag 5"):
            request.wait(timedelta(milliseconds=200))
        assert time.monotonic() - started >= 0.2
        dist.barrier()
        request.wait()  # a wait that timed out may be tried again
    else:
        dist.barrier()
        dist.send(torch.ones(1), 0, tag=5)
    for refused, what in (
        (lambda: dist.all_reduce(torch.eye(3).to_sparse()), "dense tensors expected"),
        (lambda: dist.all_reduce(torch.zeros(2, dtype=torch.float8_e5m2)), "no reductions over"),
        (lambda: dist.all_reduce(torch.zeros(2, dtype=torch.int32), dist.ReduceOp.AVG), "avg"),
        (lambda: dist.all_gather_into_tensor(torch.zeros(3), torch.zeros(2)), "not 2 times"),
        (lambda: dist.all_to_all_single(torch.zeros(3), torch.zeros(3)), "do not divide"),
        (lambda: dist.isend(torch.zeros(1), 1 - rank).get_future(), "has no future"),
    ):
        with pytest.raises((RuntimeError, ValueError, TypeError), match=what):
            refused()


def groups_and_options(rank: int) -> None:
    for transport in ("shm", "tcp"):
        group = dist.new_group(pg_options=dicomm.distributed.Options(transport=transport))
        number = torch.tensor([rank + 1])
        dist.all_reduce(number, group=group)
        assert number.item() == 3
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    number = torch.tensor([rank + 1])
    dist.all_reduce(number, group=mesh.get_group("dp"))
    dist.all_reduce(number, group=mesh.get_group("tp"))
    assert number.item() == 3


def call_from_callbacks(rank: int) -> None:
    """A future's callback calls collectives and waits for them, while the caller calls another.

    Rank 1 calls that one much later, and on rank 0 it waits before the callback is called.
    """
    first, sync, chained, last, unwaited, second = (
        torch.full((count,), rank + 1.0) for count in (3, 5, 7, 9, 11, 13)
    )

    def inner(_: torch.futures.Future) -> torch.Tensor:
        return dist.all_reduce(last, async_op=True).get_future().wait()[0]

    def outer(_: torch.futures.Future) -> torch.Tensor:
        dist.all_reduce(sync)
        dist.all_reduce(unwaited, async_op=True)
        return dist.all_reduce(chained, async_op=True).get_future().then(inner).wait()

    done = dist.all_reduce(first, async_op=True).get_future().then(outer)
    if rank == 1:
        time.sleep(0.2)
    work = dist.all_reduce(second, async_op=True)
    assert (done.wait() == 3).all()
    work.wait()
    for total in (first, sync, chained, last, unwaited, second):
        assert (total == 3).all(), total


def types_works_groups(rank: int) -> None:
    every_type_moves(rank)
    complex_and_views(rank)
    groups_and_options(rank)
    works(rank)
    call_from_callbacks(rank)


def test_types_works_and_groups() -> None:
    run_processes(SIZE, types_works_groups)


def come_again(rank: int) -> list[float]:
    """Leaves the job and joins another on the same store, which has the same name there."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    found = []
    for round_number in range(3):
        number = torch.tensor([float(rank + round_number)])
        dist.all_reduce(number)
        found.append(number.item())
        dist.destroy_process_group()
        if rank == 1:
            time.sleep(0.1)  # what rank 0 finds in the store now is of the group before
        dist.init_process_group(
            "dicomm", store=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=30)
        )
    return found


def test_a_group_made_anew_on_the_same_store() -> None:
    assert run_processes(SIZE, come_again) == [[1.0, 3.0, 5.0]] * SIZE


def miss_the_barrier(rank: int) -> str:
    dicomm.distributed.monitored_barrier()
    if rank == 2:
        time.sleep(2)
        return ""
    with pytest.raises(dist.DistBackendError) as caught:
        dicomm.distributed.monitored_barrier(timeout=timedelta(seconds=1))
    return str(caught.value)


def test_monitored_barrier_names_who_is_missing() -> None:
    outcomes = Processes(3, miss_the_barrier).outcomes({0, 1})
    for rank in (0, 1):
        _, text = outcomes[rank]
        assert "rank 2 did not reach monitored_barrier within 1000 ms" in str(text), (rank, text)


def miss_the_barrier_at_once(rank: int) -> None:
    dist.barrier()
    with pytest.raises(dist.DistBackendError, match=r"rank 1 did not reach.* within 0 ms"):
        if rank == 0:
            dicomm.distributed.monitored_barrier(timeout=timedelta(0))
        else:
            dist.recv(torch.zeros(1), 0)


def test_monitored_barrier_without_any_time_does_not_wait() -> None:
    run_processes(2, miss_the_barrier_at_once)


@pytest.mark.parametrize("option", ["strategy", "transport"])
def test_unknown_choices_are_refused(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"DICOMM_{option.upper()}", "pigeon")
    with pytest.raises(ValueError, match=f"dicomm {option} is 'pigeon', expected one of"):
        dist.init_process_group("dicomm", store=dist.HashStore(), rank=0, world_size=1)
