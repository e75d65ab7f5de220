"""Allocation, statistics, and a full chip."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import ditorch

MIB = 1 << 20


def fill(chunk_bytes: int) -> list[torch.Tensor]:
    held = []
    while True:
        try:
            held.append(torch.empty(chunk_bytes, dtype=torch.uint8, device="device"))
        except torch.OutOfMemoryError:
            return held


def test_a_full_chip_names_itself() -> None:
    chip = ditorch.chip()
    os.environ["RANK"] = "7"
    with pytest.raises(torch.OutOfMemoryError) as error:
        torch.empty(chip.memory_bytes + 1, dtype=torch.uint8, device="device")
    message = str(error.value).splitlines()[0]
    assert f"chip {chip.chip_type} of vendor {chip.vendor} ({ditorch.device}, rank 7)" in message
    assert "tried to allocate 64.00 MiB" in message
    assert "free of its 64.00 MiB" in message


def test_more_bytes_than_can_be_counted_are_refused() -> None:
    x = torch.ones(4, dtype=torch.uint8, device="device")
    with pytest.raises(torch.OutOfMemoryError):
        x.untyped_storage().resize_(-1)
    assert x.tolist() == [1, 1, 1, 1]


def test_threads_write_to_parts_of_one_storage() -> None:
    rounds = 50
    x = torch.zeros(2, 1 << 16, device="device")

    def add_ones(row: torch.Tensor) -> None:
        for _ in range(rounds):
            row.add_(1)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(add_ones, x.unbind()))
    assert x.unique().tolist() == [rounds]


def test_empty_cache_gives_back_what_another_stream_used() -> None:
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_reserved()
    side = torch.Stream(device="device")
    x = torch.ones(MIB, device="device")
    with side:
        x * 2
    x.record_stream(side)
    del x
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() <= before


def test_nothing_leaks_when_memory_runs_out_inside_an_operator() -> None:
    x = torch.ones(20 * MIB // 4, device="device", requires_grad=True)
    before = torch.accelerator.memory_allocated()
    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError):
            (x * 2 + torch.exp(x)).sum().backward()
        with pytest.raises(torch.OutOfMemoryError):
            torch.cumsum(torch.cat([x, x, x]), 0)
    assert torch.accelerator.memory_allocated() == before
    assert (x.detach() + 1).sum().item() == 2 * x.numel()


def test_cached_memory_serves_other_sizes() -> None:
    held = fill(MIB)
    capacity = len(held)
    del held
    assert capacity >= 60
    assert len(fill(2 * MIB)) >= capacity // 2 - 1
    assert len(fill(MIB)) == capacity


def test_statistics() -> None:
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    x = torch.empty(MIB, dtype=torch.uint8, device="device")
    y = torch.empty(3 * MIB, dtype=torch.uint8, device="device")
    assert torch.accelerator.memory_allocated() == before + 4 * MIB
    del y
    assert torch.accelerator.memory_allocated() == before + MIB
    assert torch.accelerator.max_memory_allocated() == before + 4 * MIB
    assert torch.accelerator.memory_reserved() >= before + 4 * MIB
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() < before + 4 * MIB
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == before + MIB
    assert torch.accelerator.memory_stats()["allocated_bytes.all.current"] == before + MIB
    del x


def test_results_of_host_kernels_lie_on_the_chip_without_a_copy() -> None:
    x = torch.ones(MIB, device="device")
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    y = torch.cumsum(x, 0)
    assert torch.accelerator.memory_allocated() == before + 4 * MIB
    assert torch.accelerator.max_memory_allocated() == before + 4 * MIB
    del y


def test_memory_used_on_another_stream_waits_for_it() -> None:
    side = torch.Stream(device="device")
    x = torch.ones(MIB, device="device")
    x.record_stream(side)
    with side:
        y = x @ x
    del x
    torch.accelerator.synchronize()
    z = torch.zeros(MIB, device="device")
    assert y.item() == MIB
    assert not z.any()


def test_threads_allocate_side_by_side() -> None:
    from concurrent.futures import ThreadPoolExecutor

    before = torch.accelerator.memory_allocated()

    def work(seed: int) -> float:
        x = torch.full((1000,), float(seed), device="device")
        for _ in range(200):
            x = x + 1 - 1
        return x.sum().item()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(8))) == [1000.0 * seed for seed in range(8)]
    assert torch.accelerator.memory_allocated() == before
