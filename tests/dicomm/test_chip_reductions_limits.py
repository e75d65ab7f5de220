"""Reductions on chips where something is in the way: what they refuse, leave alone and give up.

The chip is the asynchronous one; see test_chip_reductions.py.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import async_chip
import pytest
import torch
import torch.distributed as dist
from ranks import run_processes
from test_chip_memory import environment, join
from test_chip_reductions import LONG, alone, copied_to_host, given, same
from torch import Tensor

import dicomm.distributed
from dicomm import _c10d

FOREVER_MS = 600_000  # longer than a test may take
SEGMENT = 2**19  # elements, of which two tensors do not share a segment of the allocator


def refused(rank: int) -> None:
    device, group = join()
    parts = [torch.ones(LONG, device=device) for _ in range(2)]
    behind = torch.zeros(LONG, device=device)
    with pytest.raises(ValueError, match=f"has {LONG} elements and its output {LONG - 10_000}"):
        dist.reduce_scatter(behind[: LONG - 10_000], parts, group=group)
    assert same(behind, torch.zeros(LONG))
    with pytest.raises(ValueError, match="root 9 is not one of the 2 ranks"):
        dist.reduce(parts[0], group_dst=9, group=group)
    dist.all_reduce(parts[0], group=group)  # nothing happened
    assert same(parts[0], torch.full((LONG,), 2.0))


def test_lengths_and_roots_that_cannot_be_are_refused() -> None:
    run_processes(2, refused, environment=environment())


def fails_half_way(rank: int) -> None:
    """The chip has yet to write to a tensor whose reduction failed, and which is used again."""
    device, group = join(timeout_s=3)
    tensor = torch.ones(LONG, device=device)
    dist.all_reduce(tensor, group=group)  # now there are all the streams
    torch.accelerator.synchronize()
    if rank == 0:
        async_chip.hold(FOREVER_MS, others=True)
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(tensor, group=group)
    tensor.fill_(-1)
    if rank == 0:
        async_chip.release()
    torch.accelerator.synchronize()
    assert same(tensor, torch.full((LONG,), -1.0))


def test_what_failed_writes_to_no_tensor_that_is_used_again() -> None:
    run_processes(2, fails_half_way, environment=environment())


def left(rank: int) -> None:
    """A group that is left while a chip has yet to do what it was told."""
    device, _ = join()
    backend: Any = _c10d.Backend(
        store=dist.distributed_c10d._get_default_store(), rank=rank, world_size=2, name="left",
        rank_label=f"rank {rank}", secret="of the test", strategy="cpu-mediated", transport="auto",
        listen_address="", timeout=timedelta(milliseconds=FOREVER_MS),
    )  # fmt: skip
    tensor = torch.ones(LONG, device=device)
    backend.allreduce([tensor]).wait()
    torch.accelerator.synchronize()
    if rank == 0:
        async_chip.hold(FOREVER_MS, others=True)
    work = backend.allreduce([tensor])
    if rank == 0:
        work.get_future()
        time.sleep(0.5)  # it waits for the chip by now
        del backend
    with pytest.raises(dist.DistBackendError):
        work.wait()
    if rank == 0:
        async_chip.release()


def test_a_group_that_is_left_waits_for_no_chip() -> None:
    run_processes(2, left, environment=environment())


def paced(rank: int) -> int:
    device, group = join()
    inputs = [given(r, LONG) for r in range(2)]
    if rank == 0:
        dicomm.distributed.set_links(group, {1: (0.0, 1e12)})
    tensor = inputs[rank].to(device)
    copies = copied_to_host(lambda: dist.all_reduce(tensor, group=group))
    assert same(tensor, alone(inputs))
    return copies


def test_paced_links_pace_reductions() -> None:
    assert min(run_processes(2, paced, environment=environment())) > 0


def segments(count: int, device: str) -> list[Tensor]:
    """Tensors of one value, each in another segment of the allocator."""
    made = [torch.ones(SEGMENT, device=device) for _ in range(2 * count)]
    return [tensor[:LONG] for tensor in made[::2]]


def read_only_here(rank: int) -> tuple[int, int]:
    """What one reduction imported, and then the other."""
    device, group = join()
    tensors = segments(3, device)
    dist.reduce(tensors[0], 0, group=group)
    reduced = async_chip.imports()[0]
    result = torch.zeros(LONG, device=device)
    dist.reduce_scatter(result, tensors, group=group)
    assert same(result, torch.full((LONG,), 5.0 if rank == 0 else 3.0))
    return reduced, async_chip.imports()[0] - reduced


def test_a_rank_imports_only_what_its_chip_reads() -> None:
    first, *others = run_processes(3, read_only_here, environment=environment())
    assert first[0] == 2 and first[1] <= 2
    for reduced, scattered in others:
        assert reduced == 0 and scattered <= 2


def many_buckets(rank: int) -> tuple[int, int]:
    """How often memory was imported once every bucket was reduced, and in the end."""
    device, group = join()
    buckets = segments(10, device)
    once = 0
    for number in range(3):
        for bucket in buckets:
            dist.all_reduce(bucket, group=group)
        once = once or async_chip.imports()[0]
        for bucket in buckets:
            assert same(bucket, torch.full((LONG,), 3.0 ** (number + 1)))
    return once, async_chip.imports()[0]


def test_as_much_is_kept_of_several_peers_as_of_each_of_them() -> None:
    for once, in_all in run_processes(3, many_buckets, environment=environment()):
        assert 16 < once == in_all


def in_vain(rank: int) -> tuple[int, int]:
    """How often memory was exported for the first reduction, and for all."""
    device, group = join()
    inputs = [given(r, LONG) for r in range(2)]
    exports = []
    for _ in range(3):
        works = []
        for _ in range(2):  # the second one is called before it is known
            tensor = inputs[rank].to(device)
            works.append((dist.all_reduce(tensor, group=group, async_op=True), tensor))
        for work, tensor in works:
            work.wait()
            assert same(tensor, alone(inputs))
        exports.append(async_chip.exports())
    return exports[0], exports[-1]


def test_what_chips_cannot_do_is_not_tried_again() -> None:
    chip = environment(ASYNC_CHIP_IMPORTS="0")
    for first, in_all in run_processes(2, in_vain, environment=chip):
        assert 0 < first == in_all
