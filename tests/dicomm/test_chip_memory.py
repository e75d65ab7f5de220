"""Large messages between chips of one vendor in two processes of a host: from chip to chip.

The chip is the asynchronous one, whose memory the host cannot touch; it counts what it copies to
the host, and what it imports of other processes' memory.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import async_chip
import pytest
import torch
import torch.distributed as dist
from ranks import Processes, run_processes
from sampled import sampled
from test_distributed_async import Bench, chunked_message, message
from torch import Tensor

import dicomm.distributed

ODD_BYTES = 3 * 2**20 + 5  # as a message that goes in chunks where no chip copies it
SMALL_BYTES = 2**20


def environment(seed: int = 1, delay_us: int = 300, **more: str) -> dict[str, str]:
    chip = async_chip.environment(seed, delay_us)
    return chip | {"DICOMM_STRATEGY": "cpu-mediated"} | more


def join(shares: bool = True, timeout_s: float = 60) -> tuple[str, Any]:
    """The chip, and a group whose ranks share its memory."""
    import ditorch

    device = ditorch.device.type
    if shares:
        library = os.environ["DITORCH_VENDOR_LIBRARY"]
        assert dicomm.distributed.share_chip_memory(device, library)
    return device, dist.new_group(timeout=timedelta(seconds=timeout_s))


def content(number: int, count: int = ODD_BYTES) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)


def both_ways(rank: int) -> tuple[int, int, int]:
    """Messages of one tag that cross each other; what the chip copied to the host, and imported."""
    device, group = join()
    peer = 1 - rank
    sent = [content(10 * rank + i).to(device) for i in range(3)]
    got = [torch.empty_like(tensor) for tensor in sent]
    before, _ = async_chip.copies_to_host()
    for _ in range(2):  # the second time in memory that is imported already
        for tensor in got:
            tensor.zero_()
        works = [dist.isend(tensor, peer, group=group) for tensor in sent]
        works += [dist.irecv(tensor, peer, group=group) for tensor in got]
        for work in works:
            work.wait()
    copies = async_chip.copies_to_host()[0] - before
    for i, tensor in enumerate(got):
        assert torch.equal(tensor.cpu(), content(10 * peer + i))
    return copies, *async_chip.imports()


def test_the_host_copies_nothing_and_memory_is_imported_once() -> None:
    for copies, imports, live in run_processes(2, both_ways, environment=environment()):
        assert copies == 0
        assert 1 <= imports == live <= 3


def ever_new_memory(rank: int) -> tuple[int, int]:
    device, group = join()
    for number in range(20):
        if rank == 0:
            dist.send(content(number).to(device), 1, group=group)
            torch.accelerator.empty_cache()
            continue
        got = torch.empty(ODD_BYTES, dtype=torch.uint8, device=device)
        dist.recv(got, 0, group=group)
        assert torch.equal(got.cpu(), content(number))
    return async_chip.imports()


def test_memory_that_is_used_no_more_is_let_go_of() -> None:
    _, (imports, live) = run_processes(2, ever_new_memory, environment=environment())
    assert imports == 20 and live == 16


def in_order(rank: int, seed: int) -> list[str]:
    """What went wrong where chips are late: older work writes to the tensors, newer overwrites."""
    device, group = join()
    host = dist.new_group(backend="gloo")
    wrong = []
    for case in (chunked_message, message, on_another_stream):
        expected = case(Bench("cpu", host, seed))
        found = case(Bench(device, group, seed))
        wrong += [
            case.__name__ for a, b in zip(found, expected, strict=True) if not torch.equal(a, b)
        ]
    return wrong


def on_another_stream(bench: Bench) -> list[Tensor]:
    """The wait is on one stream, and polled before; the tensors were made on another."""
    count = ODD_BYTES // 4
    if bench.rank == 0:
        dist.send(bench.given(count)[0], 1, group=bench.group)
        return []
    (target,) = bench.empty(count, until_read=True)
    work: Any = dist.irecv(target, 0, group=bench.group)
    if bench.device == "cpu":
        work.wait()
        return [target, target]
    with torch.Stream(device=bench.device):
        work.wait()
        seen = target.clone()
    assert not work.is_completed()  # older work of the chip still uses the tensor
    async_chip.release()
    while not work.is_completed():
        time.sleep(0.001)
    torch.accelerator.synchronize()
    return [seen.cpu(), target.cpu()]


@pytest.mark.parametrize("seed", sampled([1, 2], 1, everyday=1))
def test_copies_keep_the_order_of_streams(seed: int) -> None:
    chip = environment(seed, delay_us=2000)
    assert run_processes(2, in_order, seed, environment=chip) == [[], []]


def other_ways(rank: int, shares: list[bool]) -> int:
    """Messages that only one side has in its chip's memory, or that no chip can copy."""
    device, group = join(shares[rank])
    sides = itertools.product([device, "cpu"], repeat=2)
    for number, (from_there, to_here) in enumerate(sides):
        if rank == 0:
            dist.send(content(number).to(from_there), 1, group=group)
            continue
        got = torch.zeros(ODD_BYTES, dtype=torch.uint8, device=to_here)
        dist.recv(got, 0, group=group)
        assert torch.equal(got.cpu(), content(number))
    if rank == 0:
        for count in (SMALL_BYTES, ODD_BYTES):
            dist.send(content(7, count).to(device), 1, group=group)
        dist.send(content(8, 2**22).to(device).view(2048, -1).t(), 1, group=group)
        dist.isend(content(9).to(device), 1, group=group)  # a work nobody keeps
    else:
        small = torch.zeros(SMALL_BYTES, dtype=torch.uint8, device=device)
        dist.recv(small, 0, group=group)
        assert torch.equal(small.cpu(), content(7, SMALL_BYTES))
        got = torch.zeros(ODD_BYTES, dtype=torch.uint8, device=device)
        assert dist.recv(got, group=group) == 0  # from whoever sends
        assert torch.equal(got.cpu(), content(7))
        columns = torch.zeros(2048, 2048, dtype=torch.uint8, device=device).t()
        dist.recv(columns, 0, group=group)
        assert torch.equal(columns.cpu(), content(8, 2**22).view(2048, -1).t())
        dist.recv(got, 0, group=group)
        assert torch.equal(got.cpu(), content(9))
    dist.barrier(group)
    return async_chip.imports()[0]


@pytest.mark.parametrize(
    ("shares", "imports"), [([True, True], "1"), ([True, True], "0"), ([True, False], "1")]
)
def test_where_no_chip_can_copy_the_host_does(shares: list[bool], imports: str) -> None:
    chip = environment(ASYNC_CHIP_IMPORTS=imports)
    _, imported = run_processes(2, other_ways, shares, environment=chip)
    assert (imported > 0) == (all(shares) and imports == "1")


def last_message(rank: int) -> None:
    """The receiver leaves while its chip has yet to copy, and the sender's memory is needed."""
    device, group = join()
    tensor = content(rank).to(device)
    dist.barrier(group)
    if rank == 1:
        torch.accelerator.synchronize()
        async_chip.hold(300)
        tensor.zero_()
        dist.recv(tensor, 0, group=group)
    else:
        dist.send(tensor, 1, group=group)
        tensor.fill_(0)  # the memory is the sender's again
    dist.destroy_process_group(group)
    if rank == 1:
        assert torch.equal(tensor.cpu(), content(0))
        imports, live = async_chip.imports()
        assert imports == 1 and live == 0  # nor does it keep the sender's memory


def test_a_receiver_that_leaves_finishes_its_copies() -> None:
    run_processes(2, last_message, environment=environment())


def meets_a_death(rank: int, victim: int) -> None:
    device, group = join()
    tensor = content(rank).to(device)
    for _ in range(2):  # the memory is imported
        dist.recv(tensor, 0, group=group) if rank == 1 else dist.send(tensor, 1, group=group)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.recv(tensor, 0, group=group) if rank == 1 else dist.send(tensor, 1, group=group)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_is_named(victim: int) -> None:
    processes = Processes(2, meets_a_death, victim, environment=environment())
    succeeded, text = processes.outcomes({1 - victim})[1 - victim]
    assert not succeeded
    assert f"rank {victim}" in text and "died" in text


def test_a_library_without_shared_memory_is_told_from_none_at_all(tmp_path: Path) -> None:
    import ditorch

    emulated = Path(ditorch.__file__).parent / "lib" / "libemuchip.so"
    assert not dicomm.distributed.share_chip_memory("privateuseone", str(emulated))
    assert not dicomm.distributed.share_chip_memory("privateuseone")  # its driver is not known
    with pytest.raises(ValueError, match="does not load"):
        dicomm.distributed.share_chip_memory("privateuseone", str(tmp_path / "libnone.so"))
    with pytest.raises(ValueError, match="does not speak ditorch's runtime ABI"):
        dicomm.distributed.share_chip_memory("privateuseone", "libm.so.6")
