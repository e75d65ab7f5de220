"""dicomm between chips that compute behind the host's back: what gloo gives on the CPU.

Before every operation the chip's default stream is held, and older work of it still writes to the
tensors that the operation reads and fills; afterwards newer work overwrites them. A rank that only
receives is held until the operation has returned, as the sender may be slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import async_chip
import pytest
import torch
import torch.distributed as dist
from ranks import run_processes
from sampled import sampled
from torch import Tensor

SIZE = 2
HELD_MS = 15
HELD_AT_MOST_MS = 500
LANDING_S = 0.02  # in which copies land that do not wait for the held stream
STALE = -9.0
SMALL = 12
CHUNKED = 3 * 2**20 // 4  # elements of a message that goes in chunks


class Bench:
    """Makes tensors of one device whose contents are late, and reads results in time."""

    def __init__(self, device: str, group: Any, seed: int) -> None:
        self.device, self.group = device, group
        self.rank = dist.get_rank()
        self.random = torch.Generator().manual_seed(seed * 100 + self.rank)

    def draw(self, count: int) -> Tensor:
        return torch.randint(-50, 50, (count,), generator=self.random).float()

    def late(self, *made: Tensor, until_read: bool = False) -> list[Tensor]:
        """Tensors that hold what is given once the held stream has come that far."""
        there = [values.to(self.device) for values in made]
        late = [torch.full_like(values, STALE, device=self.device) for values in made]
        if self.device != "cpu":
            torch.accelerator.synchronize()
            async_chip.hold(HELD_AT_MOST_MS if until_read else HELD_MS)
        for target, values in zip(late, there, strict=True):
            target.copy_(values)
        return late

    def tensors(
        self, given: list[int], filled: list[int], *, until_read: bool = False
    ) -> list[Tensor]:
        """Some that an operation reads, and some that it fills, of so many elements.

        `until_read` suits a rank whose chip the operation does not read.
        """
        stale = [torch.full((count,), STALE) for count in filled]
        return self.late(*(self.draw(count) for count in given), *stale, until_read=until_read)

    def given(self, *counts: int, until_read: bool = False) -> list[Tensor]:
        return self.tensors(list(counts), [], until_read=until_read)

    def empty(self, *counts: int, until_read: bool = False) -> list[Tensor]:
        return self.tensors([], list(counts), until_read=until_read)

    def read(self, *results: Tensor) -> list[Tensor]:
        """What newer work of the chip sees, which then overwrites it."""
        seen = [result.clone() for result in results]
        if self.device != "cpu":
            time.sleep(LANDING_S)
            async_chip.release()
        for result in results:
            result.fill_(STALE)
        return [tensor.cpu() for tensor in seen]


def broadcast(bench: Bench) -> list[Tensor]:
    (tensor,) = bench.given(SMALL, until_read=bench.rank != 1)
    dist.broadcast(tensor, 1, group=bench.group)
    return bench.read(tensor)


def broadcast_columns(bench: Bench) -> list[Tensor]:
    (tensor,) = bench.given(SMALL, until_read=bench.rank != 0)
    dist.broadcast(tensor.view(3, 4).t(), 0, group=bench.group)
    return bench.read(tensor)


def scatter(bench: Bench) -> list[Tensor]:
    receives = bench.rank != 0
    target, *parts = bench.tensors([SMALL] * (1 if receives else 3), [], until_read=receives)
    dist.scatter(target, parts or None, 0, group=bench.group)
    return bench.read(target)


def gather(bench: Bench) -> list[Tensor]:
    tensor, *targets = bench.tensors([SMALL], [SMALL, SMALL] * (bench.rank == 0))
    dist.gather(tensor, targets or None, 0, group=bench.group)
    return bench.read(tensor, *targets)


def all_reduce(bench: Bench) -> list[Tensor]:
    (tensor,) = bench.given(SMALL)
    dist.all_reduce(tensor, group=bench.group)
    return bench.read(tensor)


def reduce(bench: Bench) -> list[Tensor]:
    (tensor,) = bench.given(SMALL)
    dist.reduce(tensor, 1, group=bench.group)
    return bench.read(tensor) if bench.rank == 1 else []


def all_gather(bench: Bench) -> list[Tensor]:
    tensor, *targets = bench.tensors([SMALL], [SMALL, SMALL])
    dist.all_gather(targets, tensor, group=bench.group)
    return bench.read(*targets)


def reduce_scatter(bench: Bench) -> list[Tensor]:
    tensor, target = bench.tensors([2 * SMALL], [SMALL])
    dist.reduce_scatter_tensor(target, tensor, group=bench.group)
    return bench.read(target)


def all_to_all(bench: Bench) -> list[Tensor]:
    tensor, target = bench.tensors([2 * SMALL], [2 * SMALL])
    dist.all_to_all_single(target, tensor, group=bench.group)
    return bench.read(target)


def all_to_all_with_nothing_to_send(bench: Bench) -> list[Tensor]:
    receives = bench.rank == 1
    tensor, target = bench.tensors(
        [SMALL * (not receives)], [SMALL * receives], until_read=receives
    )
    sent, received = [[0, SMALL], [0, 0]], [[0, 0], [SMALL, 0]]
    dist.all_to_all_single(
        target, tensor, received[bench.rank], sent[bench.rank], group=bench.group
    )
    return bench.read(target)


def message(bench: Bench, count: int = SMALL) -> list[Tensor]:
    if bench.rank == 0:
        dist.send(bench.given(count)[0], 1, group=bench.group)
        return []
    (target,) = bench.empty(count, until_read=True)
    dist.recv(target, 0, group=bench.group)
    return bench.read(target)


def chunked_message(bench: Bench) -> list[Tensor]:
    return message(bench, CHUNKED)


def batch(bench: Bench) -> list[Tensor]:
    peer = 1 - bench.rank
    sent, received = bench.tensors([SMALL], [SMALL])
    operations = [
        dist.P2POp(dist.irecv, received, peer, group=bench.group),
        dist.P2POp(dist.isend, sent, peer, group=bench.group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return bench.read(sent, received)


def waited_for_on_another_stream(bench: Bench, *, polled: bool = False) -> list[Tensor]:
    """What that stream sees, and what is there in the end."""
    receives = bench.rank == 1
    tensor, told = bench.tensors([SMALL, SMALL], [], until_read=receives)
    works: list[Any] = [
        dist.irecv(told, 0, group=bench.group)
        if receives
        else dist.isend(told, 1, group=bench.group),
        dist.broadcast(tensor, 0, group=bench.group, async_op=True),
    ]
    if bench.device == "cpu":
        for work in works:
            work.wait()
        return [tensor, told, tensor, told]
    with torch.Stream(device=bench.device):
        for work in works:
            while polled and not work.is_completed():
                time.sleep(0.001)
            if not polled:
                work.wait()
        seen = [tensor.clone(), told.clone()]
    time.sleep(LANDING_S)
    async_chip.release()
    torch.accelerator.synchronize()
    return [values.cpu() for values in (*seen, tensor, told)]


def polled_on_another_stream(bench: Bench) -> list[Tensor]:
    return waited_for_on_another_stream(bench, polled=True)


def callback(bench: Bench) -> list[Tensor]:
    (tensor,) = bench.given(SMALL)
    work = dist.broadcast(tensor, 0, group=bench.group, async_op=True)
    doubled = work.get_future().then(lambda future: 2 * future.value()[0]).wait()
    return bench.read(doubled)


def dropped(bench: Bench) -> list[Tensor]:
    """Results nobody waits for must not land in what has their memory next."""
    kept = []
    for _ in range(4):
        (tensor,) = bench.empty(SMALL)
        dist.broadcast(tensor, 0, group=bench.group, async_op=True)
        dist.barrier(bench.group)  # the bytes are here
        del tensor
        time.sleep(0.002)  # and the worker has let go of them
        kept += [torch.zeros(SMALL).to(bench.device) for _ in range(4)]
    return bench.read(*kept)


CASES: list[Callable[[Bench], list[Tensor]]] = [
    broadcast, broadcast_columns, scatter, gather, all_reduce, reduce, all_gather, reduce_scatter,
    all_to_all, all_to_all_with_nothing_to_send, message, chunked_message, batch,
    waited_for_on_another_stream, polled_on_another_stream, callback, dropped,
]  # fmt: skip


def every_operation(rank: int, seeds: list[int]) -> list[str]:
    """What went wrong, by name."""
    import ditorch

    host = dist.new_group(backend="gloo")
    wrong = []
    for seed in seeds:
        for case in CASES:
            expected = case(Bench("cpu", host, seed))
            found = case(Bench(ditorch.device.type, None, seed))
            for ours, theirs in zip(found, expected, strict=True):
                if not torch.equal(ours, theirs):
                    wrong.append(f"{case.__name__}: {ours.tolist()[:12]} != {theirs.tolist()[:12]}")
    return wrong


LONG = pytest.mark.long


@pytest.mark.parametrize("seeds", sampled([[1], [2, 3, 4, 5, 6]], 2))
def test_received_data_waits_for_older_kernels(seeds: list[int]) -> None:
    environment = async_chip.environment(seeds[0], delay_us=2000)
    environment["DICOMM_STRATEGY"] = "cpu-mediated"
    found = run_processes(SIZE, every_operation, seeds, environment=environment)
    assert found == [[]] * SIZE


def mixed_vendors(rank: int) -> None:
    from test_mixed import check_collectives

    import ditorch
    from dicomm.distributed import Options

    for layout in ("abb", "aba"):
        group = dist.new_group(pg_options=Options(vendor=layout[rank], native="dicomm"))
        check_collectives(group, [0, 1, 2], ditorch.device.type)
        dist.destroy_process_group(group)


@pytest.mark.parametrize("seed", sampled([1, 2], 2))
def test_groups_of_several_vendors(seed: int) -> None:
    environment = async_chip.environment(seed) | {"DICOMM_STRATEGY": "cpu-mediated"}
    run_processes(3, mixed_vendors, environment=environment)


def frameworks(rank: int) -> None:
    from test_distributed_device import check_data_parallel, check_sharded

    import ditorch

    check_data_parallel(rank, ditorch.device.type)
    check_sharded(ditorch.device.type)


@pytest.mark.parametrize("seed", sampled([1, 2, 3], 3))
def test_ddp_fsdp2_and_tensor_parallelism(seed: int) -> None:
    environment = async_chip.environment(seed) | {"DICOMM_STRATEGY": "cpu-mediated"}
    run_processes(SIZE, frameworks, environment=environment)
