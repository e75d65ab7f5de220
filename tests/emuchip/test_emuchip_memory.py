"""The chip's memory: as much as the chip file says, and copies that take the link's time."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np
import pytest
from emuchip_vendor import (
    DEVICE_TO_DEVICE,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    INVALID,
    OK,
    OUT_OF_MEMORY,
    PeerHandle,
)


def test_memory_is_aligned_usable_and_counted(emulate: Any) -> None:
    vendor = emulate(memory__capacity_bytes=1 << 20)
    pointers = []
    for size_bytes in (1, 63, 64, 1000, 100_000):
        status, pointer = vendor.allocate(size_bytes)
        assert status == OK
        assert pointer % 64 == 0
        ctypes.memset(pointer, 0xAB, size_bytes)
        pointers.append(pointer)
    free_bytes, total_bytes = vendor.memory()
    assert total_bytes == 1 << 20
    assert free_bytes == total_bytes - (64 + 64 + 64 + 1024 + 100_032)
    for pointer in pointers:
        assert vendor.runtime.memory_free(0, pointer) == OK
    assert vendor.memory() == (1 << 20, 1 << 20)


def test_out_of_memory_names_requested_free_and_capacity(emulate: Any) -> None:
    vendor = emulate(chip_type="TINY", memory__capacity_bytes=4096)
    assert vendor.allocate(1024)[0] == OK
    status, pointer = vendor.allocate(3073)
    assert (status, pointer) == (OUT_OF_MEMORY, None)
    for part in ("TINY", "3073", "3072", "4096"):
        assert part in vendor.error()
    status, pointer = vendor.allocate(3072)
    assert status == OK
    assert vendor.memory()[0] == 0
    assert vendor.allocate(1)[0] == OUT_OF_MEMORY
    assert vendor.runtime.memory_free(0, pointer) == OK
    assert vendor.allocate(3072)[0] == OK


def test_a_size_near_the_end_of_the_address_space_is_out_of_memory(emulate: Any) -> None:
    assert emulate().allocate(2**64 - 1)[0] == OUT_OF_MEMORY


def test_each_device_has_its_own_memory(emulate: Any) -> None:
    vendor = emulate(devices="2", memory__capacity_bytes=4096)
    assert vendor.allocate(4096, device=0)[0] == OK
    assert vendor.allocate(4096, device=1)[0] == OK
    assert vendor.allocate(1, device=1)[0] == OUT_OF_MEMORY


def test_nothing_is_allocated_for_nothing_and_freed_as_nothing(emulate: Any) -> None:
    vendor = emulate()
    assert vendor.allocate(0) == (OK, None)
    assert vendor.runtime.memory_free(0, None) == OK


def test_freeing_what_was_not_allocated_is_invalid(emulate: Any) -> None:
    vendor = emulate()
    _, pointer = vendor.allocate(64)
    assert vendor.runtime.memory_free(0, pointer + 64) == INVALID
    assert vendor.runtime.memory_free(0, pointer) == OK
    assert vendor.runtime.memory_free(0, pointer) == INVALID
    assert "was not allocated" in vendor.error()


@pytest.mark.parametrize(
    "kind, duration_ns",
    # 40 kB: over a link of 1 MB/s, or read and written in a memory of 10 MB/s; and a launch of 1 ms
    [(HOST_TO_DEVICE, 41_000_000), (DEVICE_TO_HOST, 41_000_000), (DEVICE_TO_DEVICE, 9_000_000)],
)
def test_copies_move_the_bytes_and_take_the_links_time(
    emulate: Any, kind: int, duration_ns: int
) -> None:
    vendor = emulate(
        compute__launch_s=1e-3, memory__bandwidth_bytes_per_s=1e7, links__host_bytes_per_s=1e6
    )
    source = np.random.default_rng(0).bytes(40_000)
    target = ctypes.create_string_buffer(len(source))
    assert vendor.runtime.stream_wait_until_ns(0, None, time.monotonic_ns() + 200_000_000) == OK
    before_ns = vendor.ready_at_ns()
    assert vendor.runtime.memory_copy(0, None, target, source, len(source), kind) == OK
    returned_ns = time.monotonic_ns()
    assert vendor.ready_at_ns() - before_ns == duration_ns
    assert returned_ns < vendor.ready_at_ns()  # who reads what came to the host synchronizes
    assert vendor.runtime.stream_synchronize(0, None) == OK
    assert time.monotonic_ns() >= vendor.ready_at_ns()
    assert target.raw == source


def test_a_nic_reaches_memory_as_the_hosts(emulate: Any) -> None:
    vendor = emulate()
    _, pointer = vendor.allocate(1000)

    def ask(address: int, size_bytes: int) -> tuple[int, PeerHandle]:
        handle = PeerHandle(struct_size=ctypes.sizeof(PeerHandle))
        status = vendor.runtime.memory_peer_handle(0, address, size_bytes, ctypes.byref(handle))
        return status, handle

    status, handle = ask(pointer + 100, 900)
    assert status == OK
    assert (handle.kind, handle.fd, handle.offset_bytes) == (0, -1, 0)
    assert handle.pointer == pointer + 100
    for address, size_bytes in ((pointer + 100, 100_000), (pointer - 1, 1), (1 << 40, 8)):
        assert ask(address, size_bytes)[0] == INVALID
        assert "are not memory of device 0" in vendor.error()
    assert vendor.runtime.memory_free(0, pointer) == OK
    assert ask(pointer, 8)[0] == INVALID
