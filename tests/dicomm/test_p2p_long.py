"""Long messages between processes of one host, which both copy; and what ends or forbids that."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
import time
from pathlib import Path

import jobs
import numpy as np
import pytest

import dicomm

MIB = 1 << 20
HUGE = 512 * MIB
SIZES = [8192, 8193, 65536, 196607, 196608, MIB - 1, MIB, 5 * MIB + 3, 40 * MIB + 1]
READ_AND_WRITE = {"x86_64": (310, 311), "aarch64": (270, 271)}  # process_vm_readv, ..._writev


def forbid_peer_memory() -> None:
    """Makes this process's calls fail from here on, as a container's filter does."""
    numbers = READ_AND_WRITE[platform.machine()]
    load, equal, result = 0x20, 0x15, 0x06  # of a classic BPF program: the call's number, ...
    words = [(load, 0, 0, 0)]
    for number in numbers:
        words += [(equal, 0, 1, number), (result, 0, 0, 0x00050000 | 1)]  # EPERM
    words.append((result, 0, 0, 0x7FFF0000))  # allowed
    program = b"".join(struct.pack("<HBBI", *word) for word in words)
    text = ctypes.create_string_buffer(program)
    header = struct.pack("<H6xQ", len(words), ctypes.addressof(text))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    assert libc.prctl(22, 2, ctypes.c_char_p(header), 0, 0) == 0, os.strerror(ctypes.get_errno())


def contents(size: int, rank: int) -> np.ndarray:
    return np.random.default_rng([size, rank]).integers(0, 256, size, np.uint8)


def exchange(rank, folder, forbidden):
    if forbidden and rank in forbidden:
        forbid_peer_memory()
    with jobs.connect(folder, rank, 2, transport="shm") as communicator:
        for expected in (True, False):
            got = [np.zeros(size, np.uint8) for size in SIZES]
            sent = [contents(size, rank) for size in SIZES]
            receives, sends = [], []
            if not expected:  # all of them wait there, or here
                sends = [communicator.isend(s, 1 - rank, tag=i) for i, s in enumerate(sent)]
                communicator.send(b"sent", 1 - rank, tag=99)
                communicator.recv(bytearray(4), 1 - rank, tag=99)
            receives = [communicator.irecv(g, 1 - rank, tag=i) for i, g in enumerate(got)]
            if expected:
                communicator.send(b"posted", 1 - rank, tag=99)
                communicator.recv(bytearray(6), 1 - rank, tag=99)
                sends = [communicator.isend(s, 1 - rank, tag=i) for i, s in enumerate(sent)]
            assert [request.wait() for request in receives] == SIZES
            assert [request.wait() for request in sends] == SIZES
            for size, mine in zip(SIZES, got, strict=True):
                np.testing.assert_array_equal(mine, contents(size, 1 - rank))


@pytest.mark.parametrize("forbidden", [(), (0,), (0, 1)])
def test_long_messages_arrive_whatever_the_kernel_forbids(tmp_path, forbidden):
    jobs.run(2, exchange, tmp_path, forbidden)


def killed_receiver(rank, folder):
    communicator = jobs.connect(folder, rank, 2, transport="shm", rank_label=f"rank {rank} (chip)")
    data = np.ones(HUGE, np.uint8)
    if rank == 0:
        communicator.send(b"x", 1)
        while True:
            communicator.recv(data, 1, tag=1)
    communicator.recv(bytearray(1), 0)
    Path(folder, "go").touch()
    start = time.monotonic()
    with pytest.raises(dicomm.PeerError) as raised:
        while True:
            communicator.send(data, 0, tag=1)
    return str(raised.value), time.monotonic() - start


def test_a_receiver_killed_in_mid_copy_is_named_at_once(tmp_path):
    with jobs.Job(2, killed_receiver, tmp_path) as job:
        jobs.wait_for_file(tmp_path / "go")
        time.sleep(0.1)
        job.kill(0)
        text, waited_s = job.result(1)
    assert "rank 0 (chip)" in text and "died" in text
    assert waited_s < 10


def stopped_in_mid_copy(rank, folder):
    with jobs.connect(folder, rank, 2, transport="shm") as communicator:
        if rank == 0:
            communicator.send(b"x", 1)
            for index in range(20):
                communicator.send(np.full(64 * MIB, index, np.uint8), 1, tag=1)
            return None
        communicator.recv(bytearray(1), 0)
        Path(folder, "go").touch()
        data, timeouts = np.zeros(64 * MIB, np.uint8), 0
        for index in range(20):
            request = communicator.irecv(data, 0, tag=1)
            while True:
                try:
                    request.wait(timeout_s=0.3)
                    break
                except dicomm.TimeoutError:
                    timeouts += 1
            assert (data == index).all()
        return timeouts


def test_a_peer_stopped_in_mid_copy_is_a_timeout_and_the_message_goes_on_after(tmp_path):
    with jobs.Job(2, stopped_in_mid_copy, tmp_path) as job:
        jobs.wait_for_file(tmp_path / "go")
        time.sleep(0.05)
        sender = job.processes[0].pid
        os.kill(sender, signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(sender, signal.SIGCONT)
        assert job.result(1) >= 1
        job.result(0)


def aborted_in_mid_copy(rank, folder):
    """Rank 0 aborts while copies go both ways: there are too many to end before that."""
    communicator = jobs.connect(folder, rank, 2, transport="shm")
    buffers = [np.full(HUGE // 4, 1 + rank, np.uint8), np.zeros(HUGE // 4, np.uint8)]
    sends = [communicator.isend(buffers[0], 1 - rank) for _ in range(64)]
    receives = [communicator.irecv(buffers[1], 1 - rank) for _ in range(64)]
    if rank == 0:
        while buffers[1][0] == 0:  # until it has begun
            receives[0].test()
        communicator.abort("the loss is not a number")
    for request in (sends[-1], receives[-1]):
        with pytest.raises(dicomm.Error, match="the loss is not a number"):
            request.wait(timeout_s=10)
    for buffer in buffers:  # this rank's own again: nobody writes there, or needs what was there
        buffer[:] = 7
    time.sleep(0.5)
    assert all((buffer == 7).all() for buffer in buffers)


def test_an_abort_in_mid_copy_gives_the_buffers_back_at_once(tmp_path):
    jobs.run(2, aborted_in_mid_copy, tmp_path)
