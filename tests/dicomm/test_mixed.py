"""Collectives over several vendors: each vendor's own backend inside it, dicomm between vendors.

Pretended vendors on one machine: any ranks, contiguous or not, in equal or unequal numbers.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Failed, run_processes

import dicomm

ROOT = Path(__file__).parents[2]
DITORCH = Path(dicomm.__file__).parents[1] / "ditorch"
LAYOUTS = ("ababa", "abcab", "abbbb", "aaaaa")  # a rank's letter: its vendor
SIZES = (0, 7, 5_003, 30_000)  # empty, by leaders, and by shards


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, so that every order of summation is exact."""
    generator = torch.Generator().manual_seed(1_000 * rank + count)
    return torch.randint(-9, 9, (count,), generator=generator).to(dtype)


def check_collectives(group: Any, ranks: list[int], device: str) -> None:
    size, rank = len(ranks), dist.get_rank(group)
    op = dist.ReduceOp
    for count in SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            inputs = torch.stack([values(r, count, dtype) for r in range(size)])
            mine = inputs[rank].to(device)
            exact = inputs.to(torch.float64)
            for how, total in [(op.SUM, exact.sum(0)), (op.MAX, exact.amax(0))]:
                result = mine.clone()
                dist.all_reduce(result, how, group=group)
                assert torch.equal(result.cpu(), total.to(dtype)), (count, dtype, how)
            for root in {0, size - 1}:
                copy = mine.clone()
                dist.broadcast(copy, ranks[root], group=group)
                assert torch.equal(copy.cpu(), inputs[root]), ("broadcast", count, dtype)
                total = mine.clone()
                dist.reduce(total, ranks[root], group=group)
                expected = exact.sum(0).to(dtype) if rank == root else inputs[rank]
                assert torch.equal(total.cpu(), expected), ("reduce", count, dtype)
            whole = torch.empty(size * count, dtype=dtype, device=device)
            dist.all_gather_into_tensor(whole, mine, group=group)
            assert torch.equal(whole.cpu(), inputs.flatten()), ("all_gather", count, dtype)
            part = torch.empty(count, dtype=dtype, device=device)
            dist.reduce_scatter_tensor(part, whole, group=group)
            assert torch.equal(part.cpu(), inputs[rank] * size), ("reduce_scatter", count, dtype)
        average = values(rank, count, torch.float32).to(device)
        dist.all_reduce(average, op.AVG, group=group)
        exact = torch.stack([values(r, count, torch.float32) for r in range(size)]).sum(0) / size
        assert torch.equal(average.cpu(), exact), ("average", count)

    def rows(source: int, target: int) -> torch.Tensor:
        return values(10 * source + target, 2 * (source + target), torch.float32).view(-1, 2)

    sent = torch.cat([rows(rank, peer) for peer in range(size)]).to(device)
    received = torch.empty(sum(rank + peer for peer in range(size)), 2, device=device)
    splits = [rank + peer for peer in range(size)]
    dist.all_to_all_single(received, sent, splits, splits, group=group)
    assert torch.equal(received.cpu(), torch.cat([rows(peer, rank) for peer in range(size)]))
    turned = torch.arange(6.0, device=device).view(2, 3).t()  # not contiguous
    dist.all_reduce(turned, group=group)
    assert torch.equal(turned.cpu(), torch.arange(6.0).view(2, 3).t() * size)
    works = [torch.ones(n, device=device) for n in (3, 20_000)]
    pending = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in works]
    for work, tensor in reversed(list(zip(pending, works, strict=True))):
        work.wait()
        assert (tensor.cpu() == size).all()
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, rank, group=group)
    assert everyone == list(range(size))
    dist.barrier(group)


def over_layouts(rank: int) -> None:
    from dicomm.distributed import Options, bytes_sent

    for layout in LAYOUTS:
        mine = Options(vendor=layout[rank], native="gloo")
        group = dist.new_group(backend="dicomm", pg_options=mine)
        check_collectives(group, list(range(5)), "cpu")
        before = bytes_sent(group)
        dist.all_reduce(torch.ones(30_000), group=group)
        across = {peer: sent - before[peer] for peer, sent in bytes_sent(group).items()}
        for peer, sent in across.items():
            assert layout[peer] != layout[rank] or sent == 0, "dicomm was used inside a vendor"
        if layout == "ababa":  # a third or half of the vector, of which half is reduced elsewhere
            assert sum(across.values()) == 4 * 30_000 // layout.count(layout[rank])
        dist.destroy_process_group(group)


def test_collectives_over_vendors_of_any_layout() -> None:
    run_processes(5, over_layouts)


def different_bits(rank: int) -> bytes:
    from dicomm.distributed import Options

    group = dist.new_group(pg_options=Options(vendor="abba"[rank], native="gloo"))
    data = torch.randn(50_001, generator=torch.Generator().manual_seed(rank)).bfloat16()
    dist.all_reduce(data, group=group)
    dist.destroy_process_group(group)
    return data.view(torch.int16).numpy().tobytes()


def test_rounded_sums_have_equal_bits_on_every_rank() -> None:
    results = run_processes(4, different_bits)
    assert len(results[0]) == 100_002 and set(results) == {results[0]}


def no_native(rank: int) -> None:
    from dicomm.distributed import Options

    dist.new_group(pg_options=Options(vendor="a", native="zzz" if rank else None))


def test_a_native_backend_must_be_named_and_known() -> None:
    with pytest.raises(Failed, match="no native backend: name one") as failed:
        run_processes(2, no_native)
    assert "native backend 'zzz' is not one of" in str(failed.value)


def no_vendor(nameless: int, rank: int) -> str:
    """Makes a group in which one rank names no vendor; returns what the other is told."""
    from dicomm.distributed import Options

    options = Options(vendor=None if rank == nameless else "a", native="gloo")
    if rank == nameless:
        with suppress(dist.DistStoreError):
            dist.new_group(timeout=timedelta(seconds=2), pg_options=options)
        return ""
    with pytest.raises(dist.DistStoreError) as failed:
        dist.new_group(timeout=timedelta(seconds=2), pg_options=options)
    return str(failed.value)


@pytest.mark.parametrize(
    ("nameless", "missing"),
    [
        (0, "the vendors (its rank 0 tells them once all ranks have named theirs)"),
        (1, "the vendor of its rank 1 (every rank names one or none does)"),
    ],
)
def test_a_rank_that_names_no_vendor_is_named(nameless: int, missing: str) -> None:
    told = run_processes(2, partial(no_vendor, nameless))[1 - nameless]
    assert told == f"dicomm: the new process group lacks {missing} after 2 s"


# A vendor library that passes everything on to emuchip's and counts who synchronises.
COUNTING = """
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdlib.h>
#include "operators.h"
#include "runtime.h"

static const ditorch_runtime* real;
static ditorch_runtime ours;
static atomic_long count;

static ditorch_status device_synchronize(int32_t device) {
  ++count;
  return real->device_synchronize(device);
}
static ditorch_status stream_synchronize(int32_t device, ditorch_stream* stream) {
  ++count;
  return real->stream_synchronize(device, stream);
}
static ditorch_status event_synchronize(int32_t device, ditorch_event* event) {
  ++count;
  return real->event_synchronize(device, event);
}
long synchronizations(void) { return count; }

static void* entry(const char* name) {
  return dlsym(dlopen(getenv("COUNTED_LIBRARY"), RTLD_NOW | RTLD_LOCAL), name);
}

const ditorch_operators* ditorch_vendor_operators(uint32_t version) {
  return ((ditorch_vendor_operators_fn)entry("ditorch_vendor_operators"))(version);
}

const ditorch_runtime* ditorch_vendor_runtime(uint32_t version) {
  real = ((ditorch_vendor_runtime_fn)entry("ditorch_vendor_runtime"))(version);
  ours = *real;
  ours.device_synchronize = device_synchronize;
  ours.stream_synchronize = stream_synchronize;
  ours.event_synchronize = event_synchronize;
  return &ours;
}
"""


def on_chips(rank: int, library: str) -> None:
    os.environ["EMUCHIP_CHIP"] = str(DITORCH / "chips" / ("a-mini.toml", "b-mini.toml")[rank % 2])
    os.environ["DITORCH_VENDOR_LIBRARY"] = library
    import ditorch
    from dicomm.distributed import Options, set_device_clock

    clock = ditorch.device_clock()
    assert clock is not None
    set_device_clock(*clock)
    device = clock[0]
    counted = ctypes.CDLL(library)
    counted.synchronizations.restype = ctypes.c_long
    options = Options(vendor="ab"[rank % 2], native="dicomm")
    group = dist.new_group(backend="dicomm", pg_options=options)
    check_collectives(group, list(range(4)), device)
    small, large = torch.ones(5, device=device), torch.ones(40_000, device=device)
    whole = torch.empty(160_000, device=device)
    dist.all_reduce(small, group=group)
    torch.get_device_module(device).synchronize()
    before = counted.synchronizations()
    assert before > 0, "nothing was counted"
    for _ in range(5):
        dist.all_reduce(small, group=group)
        dist.all_reduce(large, group=group)
        dist.broadcast(large, 1, group=group)
        dist.all_gather_into_tensor(whole, large, group=group)
        dist.reduce_scatter_tensor(large, whole, group=group)
    assert counted.synchronizations() == before, "a collective synchronised the host with a stream"
    torch.get_device_module(device).synchronize()
    assert small.cpu()[0] == 4.0**6
    dist.destroy_process_group(group)


def test_emulated_chips_and_no_synchronisation(tmp_path: Path) -> None:
    source, library = tmp_path / "counting.c", tmp_path / "libcounting.so"
    source.write_text(COUNTING)
    subprocess.run(
        [os.environ.get("CC", "gcc"), "-shared", "-fPIC", f"-I{ROOT / 'csrc' / 'ditorch' / 'abi'}",
         source, "-ldl", "-o", library],
        check=True,
    )  # fmt: skip
    emuchip = DITORCH / "lib" / "libemuchip.so"
    run_processes(4, on_chips, str(library), environment={"COUNTED_LIBRARY": str(emuchip)})
