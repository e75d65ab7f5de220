"""Sends from a chip that has yet to compute their bytes: the host is not held, the message is.

The chip is the asynchronous one; its default stream is held before a tensor gets its contents.
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
from torch import Tensor

import dicomm.distributed

HELD_MS = 20_000  # longer than any test waits for what must not wait for it
SMALL = 12
CHUNKED = 3 * 2**20 + 5  # bytes of a message that goes in chunks, or from chip to chip


def environment(seed: int = 1) -> dict[str, str]:
    return async_chip.environment(seed) | {"DICOMM_STRATEGY": "cpu-mediated"}


def join(shares: bool = False, timeout_s: float = 60) -> tuple[str, Any]:
    import ditorch

    if shares:
        library = ditorch.vendor_library()
        assert library and dicomm.distributed.share_chip_memory(ditorch.device.type, library)
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    dist.barrier(group)
    return ditorch.device.type, group


def content(number: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)


def held(device: str, *made: Tensor) -> list[Tensor]:
    """Tensors that get what is given once the chip is released."""
    there = [values.to(device) for values in made]
    late = [torch.zeros_like(values) for values in there]
    torch.accelerator.synchronize()
    async_chip.hold(HELD_MS)
    for target, values in zip(late, there, strict=True):
        target.copy_(values)
    return late


def messages_pass(rank: int, shares: bool) -> None:
    """Receives a held one, one from the host and one whose tensor nobody keeps, each by its tag."""
    device, group = join(shares)
    counts = [SMALL, CHUNKED, SMALL]
    if rank == 1:
        dist.barrier(group)  # passes although the chip of the other rank is held
        other = torch.zeros(SMALL, dtype=torch.uint8)
        dist.recv(other, 0, group=group, tag=9)  # as does a message of another tag
        assert torch.equal(other, content(9, SMALL))
        dist.send(other, 0, group=group, tag=9)
        for number, count in enumerate(counts):
            for place in (device, "cpu", device):
                got = torch.zeros(count, dtype=torch.uint8, device=place)
                dist.recv(got, 0, group=group)
                assert torch.equal(got.cpu(), content(number, count)), (number, place)
        return
    tensors = held(device, *(content(number, count) for number, count in enumerate(counts)))
    works: list[Any] = []
    for number, tensor in enumerate(tensors):
        works.append(dist.isend(tensor, 1, group=group))
        works.append(dist.isend(content(number, counts[number]), 1, group=group))
        works.append(dist.isend(tensor.clone(), 1, group=group))
    dist.barrier(group)
    dist.send(content(9, SMALL), 1, group=group, tag=9)
    dist.recv(torch.zeros(SMALL, dtype=torch.uint8), 1, group=group, tag=9)
    assert not any(work.is_completed() for work in works)  # the chip is held as yet
    async_chip.release()
    for work in works:
        work.wait()


@pytest.mark.parametrize("shares", [False, True])
def test_a_held_message_holds_nobody_and_keeps_its_place(shares: bool) -> None:
    run_processes(2, messages_pass, shares, environment=environment())


def goes_through_the_host(rank: int) -> None:
    """A message offered from chip to chip that the peer cannot pull, and whose copy is late."""
    device, group = join(shares=True)
    if rank == 1:
        dist.send(content(2, SMALL), 0, group=group, tag=2)
        got = torch.zeros(CHUNKED, dtype=torch.uint8, device=device)
        work: Any = dist.irecv(got, 0, group=group, tag=1)
        dist.barrier(group)  # passes meanwhile
        dist.barrier(group)
        work.wait()
        assert torch.equal(got.cpu(), content(1, CHUNKED))
        return
    sent = content(1, CHUNKED).to(device)
    torch.accelerator.synchronize()
    received, *_ = held(device, torch.zeros(SMALL, dtype=torch.uint8))
    arrival: Any = dist.irecv(received, 1, group=group, tag=2)
    arrival.wait()  # what the chip copies from here on is behind the held stream
    with torch.Stream(device=device):
        departure: Any = dist.isend(sent, 1, group=group, tag=1)
    dist.barrier(group)
    dist.barrier(group)
    assert not departure.is_completed()
    async_chip.release()
    departure.wait()
    assert torch.equal(received.cpu(), content(2, SMALL))


def test_a_copy_for_a_peer_that_cannot_pull_holds_nobody() -> None:
    run_processes(2, goes_through_the_host, environment=environment() | {"ASYNC_CHIP_IMPORTS": "0"})


def waited_for(work: Any) -> str:
    with pytest.raises(RuntimeError) as failure:
        work.wait()
    return str(failure.value)


def times_out(rank: int) -> str:
    device, group = join(timeout_s=1)
    if rank == 1:
        dist.barrier(dist.group.WORLD)
        got = torch.zeros(SMALL, dtype=torch.uint8)
        dist.recv(got, 0, group=dist.group.WORLD)
        return ""
    (tensor,) = held(device, content(1, SMALL))
    work: Any = dist.isend(tensor, 1, group=group)
    said = waited_for(work)
    dist.barrier(dist.group.WORLD)
    async_chip.release()
    dist.send(tensor, 1, group=dist.group.WORLD)
    return said


def test_a_chip_that_does_not_come_to_it_is_named() -> None:
    said, _ = run_processes(2, times_out, environment=environment())
    assert f"send of {SMALL} bytes to rank 1" in said and "tag 0" in said
    assert "this rank's chip has yet to get there" in said


def is_aborted(rank: int) -> list[str]:
    """What its works say once the group was aborted under them, with the chip held as yet."""
    device, group = join()
    if rank == 1:
        other = dist.new_group()
        got = torch.zeros(CHUNKED, dtype=torch.uint8, device=device)
        dist.recv(got, 0, group=other)
        assert torch.equal(got.cpu(), content(1, CHUNKED))
        return []
    (tensor,) = held(device, content(1, CHUNKED))
    works: list[Any] = [
        dist.isend(tensor, 1, group=group),
        dist.broadcast(tensor, 0, group=group, async_op=True),
    ]
    begun = time.monotonic()
    group._get_backend(torch.device("cpu")).abort()
    said = [waited_for(work) for work in works]
    assert time.monotonic() - begun < HELD_MS / 2000
    works.clear()
    # The chip has yet to copy to their memory, which serves no other message before.
    work: Any = dist.isend(tensor, 1, group=dist.new_group())
    async_chip.release()
    work.wait()
    return said


def test_a_group_that_is_aborted_takes_what_is_held_along() -> None:
    said, _ = run_processes(2, is_aborted, environment=environment())
    assert len(said) == 2 and all("aborted" in sentence for sentence in said)
    assert "to rank 1" in said[0]


def collectives_pass(rank: int) -> list[str]:
    """Returns the operations whose results differ from those of the host's tensors."""
    device, group = join()
    host, other = dist.new_group(backend="gloo"), dist.new_group()
    made = [content(3 * rank + i, 2 * SMALL).to(torch.int32) for i in range(3)]
    summed, gathered, scattered = held(device, *made)
    results = [made[0], torch.zeros(2, 2 * SMALL, dtype=torch.int32), torch.zeros_like(made[2])]
    ours = [summed, torch.zeros_like(results[1], device=device), scattered.clone()]

    def start(group: Any, inputs: list[Tensor], outputs: list[Tensor]) -> list[Any]:
        return [
            dist.all_reduce(outputs[0], group=group, async_op=True),
            dist.all_gather_into_tensor(outputs[1].view(-1), inputs[1], group=group, async_op=True),
            dist.all_to_all_single(outputs[2], inputs[2], group=group, async_op=True),
        ]

    works = start(group, [summed, gathered, scattered], ours)
    dist.barrier(other)
    assert not any(work.is_completed() for work in works)
    async_chip.release()
    for work in [*works, *start(host, made, results)]:
        work.wait()
    names = ["all_reduce", "all_gather", "all_to_all"]
    return [
        name
        for name, found, expected in zip(names, ours, results, strict=True)
        if not torch.equal(found.cpu(), expected)
    ]


def test_a_collective_in_the_background_holds_nobody() -> None:
    assert run_processes(2, collectives_pass, environment=environment()) == [[], []]
