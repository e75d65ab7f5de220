"""What planners take a collective for, against dicomm's own collective on paced links."""

from __future__ import annotations

import ctypes
import statistics
import time
from functools import partial

import pytest
import ranks
import torch
import torch.distributed as dist
from test_distributed_device import start_chip

from heteropp.cost.communication import all_gather_s, all_reduce_s, broadcast_s
from heteropp.description.cluster import Link

# slow enough that the host's own time is little beside it
LINK = Link(latency_s=0.1, bytes_per_s=4e6)
# on both sides of the sizes from which dicomm takes another algorithm
SIZES_BYTES = (16 << 10, 24 << 10, 64 << 10, 80 << 10, 520 << 10)
TIMES = 3
PREDICTED = {"all_reduce": all_reduce_s, "all_gather": all_gather_s, "broadcast": broadcast_s}


def paced(rank: int) -> dict[tuple[str, int], list[tuple[int, int]]]:
    """Returns when each collective began and ended on the chip, by its name and its bytes.

    Each is done some times: on a busy machine a rank may begin late.
    """
    import dicomm.distributed

    device, ready_at_ns, _ = start_chip(rank)
    clock = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int32)(ready_at_ns)
    size = dist.get_world_size()
    meeting = dist.new_group()  # its links are not paced
    dist.all_reduce(torch.ones(1, device=device))  # connected
    peers = {peer: (LINK.latency_s, LINK.bytes_per_s) for peer in range(size) if peer != rank}
    dicomm.distributed.set_links(None, peers)
    found: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for size_bytes in SIZES_BYTES:
        whole = torch.ones(size_bytes // 4 // size * size, device=device)
        piece = whole.chunk(size)[rank].clone()
        for name, collective in {
            "all_reduce": partial(dist.all_reduce, whole),
            "all_gather": partial(dist.all_gather_into_tensor, whole, piece),
            "broadcast": partial(dist.broadcast, whole, 0),
        }.items():
            times = found[name, whole.nbytes] = []
            for _ in range(TIMES):
                torch.accelerator.synchronize()
                dist.barrier(meeting)
                begun_ns = time.monotonic_ns()
                collective()
                times.append((begun_ns, clock(0)))
    return found


@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor")
@pytest.mark.parametrize("size", [2, *(pytest.param(n, marks=pytest.mark.long) for n in (4, 9))])
def test_a_collective_takes_as_long_as_planners_take_it_for(size: int) -> None:
    by_rank = ranks.run_processes(size, paced)
    for name, size_bytes in by_rank[0]:
        predicted_s = PREDICTED[name](size_bytes, size, LINK)
        measured_s = statistics.median(
            (max(end for _, end in one) - max(begin for begin, _ in one)) / 1e9
            for one in zip(*(found[name, size_bytes] for found in by_rank), strict=True)
        )
        off_by = (measured_s - predicted_s) / LINK.latency_s
        assert abs(off_by) < 0.5, (name, size_bytes, measured_s, predicted_s)
