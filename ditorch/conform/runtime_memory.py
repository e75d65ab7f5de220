"""Checks of memory: allocation, reuse, a full chip, statistics."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

import ditorch
from ditorch.conform.check import Group, Unsupported
from ditorch.conform.runtime_here import (
    DEVICE,
    expect,
    expect_equal,
    expect_error,
    from_accelerator,
    need_accelerator,
)

memory = Group("memory")

MIB = 1 << 20


def _bytes(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device=DEVICE)


@contextmanager
def _alone() -> Iterator[int]:
    """The bytes that are free, while no other process of this suite fills the same chip."""
    with (Path(tempfile.gettempdir()) / f"ditorch-conform-{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        from_accelerator("empty_cache")()
        yield from_accelerator("get_memory_info")()[0]
        from_accelerator("empty_cache")()


@memory("pointers are aligned, and tensors do not overlap")
def _aligned() -> None:
    held = [_bytes(count).fill_(count % 251) for count in (1, 3, 64, 1000, 4097, 100_000) * 3]
    for x in held:
        expect_equal(x.data_ptr() % 16, 0, "an address modulo 16 bytes")
        expect(bool((x == x.numel() % 251).all().item()), f"{x.numel()} bytes were overwritten")


@memory("a tensor without elements needs no memory")
def _nothing() -> None:
    x = torch.empty(0, 3, device=DEVICE)
    expect_equal(x.sum().item(), 0, "the sum of nothing")
    expect_equal(torch.cat([x, torch.ones(1, 3, device=DEVICE)]).tolist(), [[1, 1, 1]], "cat")


@memory("freed memory is used again")
def _reuse() -> None:
    reserved = from_accelerator("memory_reserved")
    held = [_bytes(MIB)]
    before = reserved()
    for _ in range(20):
        held.clear()
        held.append(_bytes(MIB))
    expect(reserved() <= before + 2 * MIB, f"20 tensors of 1 MiB took {reserved() - before} bytes")


@memory("statistics follow tensors")
def _statistics() -> None:
    allocated, peak = from_accelerator("memory_allocated"), from_accelerator("max_memory_allocated")
    from_accelerator("empty_cache")()
    from_accelerator("reset_peak_memory_stats")()
    before = allocated()
    x = _bytes(3 * MIB)
    expect_equal(allocated() - before, 3 * MIB, "the bytes of a tensor of 3 MiB")
    del x
    expect_equal(allocated(), before, "the bytes after it is freed")
    expect(peak() >= before + 3 * MIB, f"the peak is {peak()}, below what was held")
    from_accelerator("reset_peak_memory_stats")()
    expect_equal(peak(), before, "the peak after a reset")
    stats = from_accelerator("memory_stats")()
    expect_equal(stats["allocated_bytes.all.current"], before, "allocated_bytes.all.current")


@memory("empty_cache gives back what no tensor holds")
def _empty_cache() -> None:
    reserved = from_accelerator("memory_reserved")
    from_accelerator("empty_cache")()
    before = reserved()
    x = _bytes(8 * MIB)
    expect(reserved() >= before + 8 * MIB, "memory_reserved() does not see a tensor of 8 MiB")
    del x
    from_accelerator("empty_cache")()
    expect(reserved() <= before, f"{reserved() - before} bytes stay reserved")


@memory("memory info counts what is free")
def _info() -> None:
    info = from_accelerator("get_memory_info")
    free_bytes, total_bytes = info()
    expect(0 < free_bytes <= total_bytes, f"{free_bytes} bytes free of {total_bytes}")
    from_accelerator("empty_cache")()
    before = info()[0]
    x = _bytes(8 * MIB)
    expect(info()[0] <= before - 8 * MIB, "8 MiB more are held and as much is free as before")
    del x


@memory("asking for more than the chip has raises OutOfMemoryError, and nothing else happens")
def _too_much() -> None:
    _, total_bytes = from_accelerator("get_memory_info")()
    error = expect_error(
        torch.OutOfMemoryError, lambda: _bytes(total_bytes + MIB), "more than the whole memory"
    )
    expect(str(error).strip() != "", "the error says nothing")
    expect_equal(torch.ones(4, device=DEVICE).sum().item(), 4, "a sum afterwards")


@memory("a full chip works again once something is freed")
def _full() -> None:
    allocated = from_accelerator("memory_allocated")
    before = allocated()
    held: list[torch.Tensor] = []
    with _alone() as free_bytes:

        def fill() -> None:
            while True:
                held.append(_bytes(free_bytes * 2 // 15))

        expect_error(torch.OutOfMemoryError, fill, "memory without end")
        expect(len(held) >= 4, f"the chip was full after {len(held)} parts of 7.5 that are free")
        count = len(held)
        held.clear()
        expect_equal(allocated(), before, "the bytes held after everything is freed")
        expect_error(torch.OutOfMemoryError, fill, "memory without end")
        expect_equal(len(held), count, "how many parts fit the second time")
        held.clear()


@memory("cached memory serves other sizes when the chip is full")
def _other_sizes() -> None:
    _, total_bytes = from_accelerator("get_memory_info")()
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if ditorch.is_emulated() and total_bytes > host_bytes // 2:
        raise Unsupported("the emulated chip's memory is larger than what its host can lend")
    with _alone() as free_bytes:
        size_bytes = free_bytes // 8
        small: list[torch.Tensor] = []
        while len(small) < 6:
            small.append(_bytes(size_bytes))
        small.clear()
        x = _bytes(5 * size_bytes)
        expect_equal(x.numel(), 5 * size_bytes, "the size of a tensor in place of six smaller ones")
        del x


@memory("running out inside an operator leaks nothing")
def _no_leak() -> None:
    _, total_bytes = from_accelerator("get_memory_info")()
    allocated = from_accelerator("memory_allocated")
    with _alone():
        quarters = [_bytes(total_bytes // 4)] * 4
        before = allocated()
        for _ in range(2):
            expect_error(torch.OutOfMemoryError, lambda: torch.cat(quarters), "a result too large")
        expect_equal(allocated(), before, "the bytes held after the failures")
        quarters.clear()


@memory("memory used on another stream is not reused before that stream is done")
def _record_stream() -> None:
    need_accelerator("streams")
    side = torch.Stream(device=DEVICE)
    x = torch.full((1 << 16,), 2.0, device=DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = x * 3
    x.record_stream(side)
    del x
    z = torch.zeros(1 << 16, device=DEVICE)
    torch.accelerator.synchronize()
    expect(bool((y == 6).all().item()), "the other stream read memory that was already reused")
    expect(not z.any().item(), "the new tensor was written to by the other stream")


@memory("threads allocate side by side")
def _threads() -> None:
    def work(seed: int) -> float:
        x = torch.full((1000,), float(seed), device=DEVICE)
        for _ in range(50):
            x = x + 1 - 1
        return x.sum().item()

    with ThreadPoolExecutor(4) as pool:
        expect_equal(list(pool.map(work, range(8))), [1000.0 * s for s in range(8)], "the sums")
