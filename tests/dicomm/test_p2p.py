"""Messages between two or three real processes, over each transport."""

import ctypes
import gc
import hashlib
import mmap
import os
import resource
import threading
import time
from pathlib import Path

import jobs
import numpy as np
import pytest

import dicomm

SIZES = [
    *(0, 1, 7, 8, 20, 21, 4096, 8160, 8161, 8192, 8193, 65536, 262144, 262145),
    *(1 << 20, (1 << 20) + 1, (5 << 20) + 3),
    64 << 20,
]
pytestmark = pytest.mark.parametrize("transport", ["shm", "tcp"])


def pattern(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


def echo_sizes(rank, folder, transport):
    with jobs.connect(folder, rank, 2, transport=transport) as communicator:
        for length in SIZES:
            expected = pattern(length, length)
            buffer = np.zeros(length, np.uint8)
            if rank == 0:
                communicator.send(expected, 1, tag=length)
                assert communicator.recv(buffer, 1, tag=length) == length
            else:
                assert communicator.recv(buffer, 0, tag=length) == length
                communicator.send(buffer, 0, tag=length)
            assert np.array_equal(buffer, expected)
        return communicator.bytes_sent(1 - rank)


def test_every_size_arrives_as_sent(tmp_path, transport):
    assert jobs.run(2, echo_sizes, tmp_path, transport) == [sum(SIZES)] * 2


def over_2_gib(rank, folder, transport):
    length = (2 << 30) + 12345
    memory = mmap.mmap(-1, length)
    memory.madvise(mmap.MADV_HUGEPAGE)
    view = np.frombuffer(memory, np.uint8)
    with jobs.connect(folder, rank, 2, transport=transport, timeout_s=60) as communicator:
        if rank == 0:
            view[:: 1 << 20] = pattern(len(view[:: 1 << 20]), 3)
            view[-1] = 77
            communicator.send(view, 1)
        else:
            assert communicator.recv(view, 0) == length
        return length, hashlib.sha256(view[:: 1 << 12].tobytes()).hexdigest(), int(view[-1])


@pytest.mark.long
def test_a_message_over_2_gib(tmp_path, transport):
    sent, received = jobs.run(2, over_2_gib, tmp_path, transport)
    assert sent == received
    assert received[2] == 77


def without_reading_each_other(rank, folder, transport):
    with jobs.connect(folder, rank, 2, transport=transport) as communicator:
        communicator.send(b"x", 1 - rank)  # connects, while the folder can still be read
        communicator.recv(bytearray(1), 1 - rank)
        lengths = [9000, 5_000_001]
        inputs, expected = ([pattern(n, r) for n in lengths] for r in (rank, 1 - rank))
        if os.geteuid() == 0:
            os.setuid(65534)
        pr_set_dumpable = 4
        assert ctypes.CDLL(None).prctl(pr_set_dumpable, 0, 0, 0, 0) == 0
        for data, other in zip(inputs, expected, strict=True):
            buffer = np.zeros_like(other)
            request = communicator.isend(data, 1 - rank)
            communicator.recv(buffer, 1 - rank)
            request.wait()
            assert np.array_equal(buffer, other)


def test_processes_that_may_not_read_each_others_memory(tmp_path, transport):
    jobs.run(2, without_reading_each_other, tmp_path, transport)


def many_in_flight(rank, folder, transport):
    lengths = [(i * 7919) % 40_000 for i in range(300)] + [300_000, 2 << 20, 0]
    with jobs.connect(folder, rank, 2, transport=transport) as communicator:
        peer = 1 - rank
        inputs = [pattern(n, 1000 * rank + i) for i, n in enumerate(lengths)]
        outputs = [np.zeros(n, np.uint8) for n in lengths]
        sends = [communicator.isend(data, peer, tag=i) for i, data in enumerate(inputs)]
        # Received in another order than sent: everything is unexpected at first.
        order = np.random.default_rng(rank).permutation(len(lengths))
        receives = {int(i): communicator.irecv(outputs[i], peer, tag=int(i)) for i in order}
        for i, request in receives.items():
            assert request.wait() == lengths[i]
        for request in sends:
            request.wait()
        for i, n in enumerate(lengths):
            assert np.array_equal(outputs[i], pattern(n, 1000 * peer + i)), i


def test_many_in_flight_both_ways_received_in_another_order(tmp_path, transport):
    jobs.run(2, many_in_flight, tmp_path, transport)


def same_tag_in_order(rank, folder, transport):
    lengths = [8, 1 << 20, 0, 100_000, 16, 3 << 20, 8]
    with jobs.connect(folder, rank, 2, transport=transport) as communicator:
        if rank == 0:
            for request in [
                communicator.isend(pattern(n, i), 1, tag=5) for i, n in enumerate(lengths)
            ]:
                request.wait()
        else:
            for i, n in enumerate(lengths):
                buffer = np.zeros(4 << 20, np.uint8)
                assert communicator.recv(buffer, 0, tag=5) == n
                assert np.array_equal(buffer[:n], pattern(n, i))


def test_messages_of_one_tag_arrive_in_order(tmp_path, transport):
    jobs.run(2, same_tag_in_order, tmp_path, transport)


def flood(rank, folder, transport):
    """More unexpected messages than a receiver is ready to buffer."""
    count, length = 4000, 4000
    with jobs.connect(folder, rank, 2, transport=transport) as communicator:
        if rank == 0:
            data = pattern(length, 1)
            sends = [communicator.isend(data, 1, tag=1) for _ in range(count)]
            communicator.send(np.array([42]), 1, tag=2)
            for request in sends:
                request.wait()
        else:
            last = np.zeros(1, np.int64)
            communicator.recv(last, 0, tag=2)
            assert last[0] == 42
            buffer = np.zeros(length, np.uint8)
            for _ in range(count):
                assert communicator.recv(buffer, 0, tag=1) == length
            assert np.array_equal(buffer, pattern(length, 1))


def test_unmatched_messages_hold_up_no_other(tmp_path, transport):
    jobs.run(2, flood, tmp_path, transport)


def any_source(rank, folder, transport):
    with jobs.connect(folder, rank, 3, transport=transport) as communicator:
        if rank != 0:
            communicator.send(np.full(1000 * rank, rank, np.uint8), 0, tag=9)
            communicator.recv(bytearray(1), 0, tag=10)
            return None
        seen = {}
        for _ in range(2):
            buffer = np.zeros(5000, np.uint8)
            request = communicator.irecv(buffer, dicomm.ANY_SOURCE, tag=9)
            length = request.wait()
            assert (buffer[:length] == request.peer).all()
            seen[request.peer] = length
        for peer in (1, 2):
            communicator.send(b"x", peer, tag=10)
        return seen


def test_any_source_tells_who_sent(tmp_path, transport):
    assert jobs.run(3, any_source, tmp_path, transport)[0] == {1: 1000, 2: 2000}


def everyone_at_once(rank, folder, transport, world_size):
    rounds = 30
    with jobs.connect(folder, rank, world_size, transport=transport) as communicator:
        peers = [peer for peer in range(world_size) if peer != rank]
        for i in range(rounds):
            buffers = {peer: np.zeros(1, np.int64) for peer in peers}
            receives = [communicator.irecv(buffers[peer], peer, tag=i) for peer in peers]
            sends = [communicator.isend(np.array([rank * 1000 + i]), p, tag=i) for p in peers]
            for request in receives + sends:
                request.wait()
            assert all(buffers[peer][0] == peer * 1000 + i for peer in peers)


def test_ranks_that_all_call_each_other_at_once(tmp_path, transport):
    jobs.run(8, everyone_at_once, tmp_path, transport, 8)


def truncated(rank, folder, transport):
    with jobs.connect(folder, rank, 2, transport=transport) as communicator:
        errors = []
        for length in (100, 50_000, 2 << 20):
            if rank == 0:
                communicator.send(pattern(length, 0), 1, tag=1)
                communicator.send(pattern(10, 1), 1, tag=1)
            else:
                small = np.zeros(60, np.uint8)
                with pytest.raises(dicomm.Error) as raised:
                    communicator.recv(small, 0, tag=1)
                errors.append(str(raised.value))
                assert not small.any()
                assert communicator.recv(small, 0, tag=1) == 10
                assert np.array_equal(small[:10], pattern(10, 1))
        return errors


def test_a_longer_message_is_an_error_with_both_lengths_and_the_stream_goes_on(tmp_path, transport):
    errors = jobs.run(2, truncated, tmp_path, transport)[1]
    for length, error in zip((100, 50_000, 2 << 20), errors, strict=True):
        assert f"{length} bytes" in error and "60" in error and "rank 0" in error


LONG = 4 << 20  # bytes of a message that waits for its receive, over any transport


def cancelled(rank, folder, transport):
    with jobs.connect(folder, rank, 2, transport=transport) as communicator:
        if rank == 0:
            for _ in range(3):
                dropped = communicator.isend(pattern(LONG, 5), 1, tag=1)
                del dropped
            communicator.send(b"x", 1, tag=3)  # a receive posted earlier might still get one
            communicator.send(pattern(LONG, 6), 1, tag=1)
        else:
            dropped = communicator.irecv(np.zeros(100, np.uint8), 0, tag=2)
            del dropped
            gc.collect()
            buffer = np.zeros(LONG, np.uint8)
            request = communicator.irecv(bytearray(1), 0, tag=99)
            assert not request.test()
            communicator.recv(bytearray(1), 0, tag=3)
            communicator.recv(buffer, 0, tag=1)
            assert np.array_equal(buffer, pattern(LONG, 6))


def test_dropped_requests_leave_nothing_behind(tmp_path, transport):
    jobs.run(2, cancelled, tmp_path, transport)


def from_threads(rank, folder, transport):
    failures = []
    with jobs.connect(folder, rank, 2, transport=transport) as communicator:

        def body(tag):
            try:
                for i in range(50):
                    length = (i * 997 * (tag + 1)) % 100_000
                    buffer = np.zeros(length, np.uint8)
                    request = communicator.irecv(buffer, 1 - rank, tag)
                    communicator.send(pattern(length, i + tag), 1 - rank, tag)
                    assert request.wait() == length
                    assert np.array_equal(buffer, pattern(length, i + tag))
            except Exception as error:
                failures.append(repr(error))

        threads = [threading.Thread(target=body, args=(tag,)) for tag in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return failures


def test_calls_from_several_threads(tmp_path, transport):
    assert jobs.run(2, from_threads, tmp_path, transport) == [[], []]


def waiting_together(rank, folder, transport):
    with jobs.connect(folder, rank, 2, transport=transport) as communicator:
        if rank == 1:
            communicator.recv(bytearray(1), 0, tag=9)
            for tag in (0, 1):
                communicator.send(b"x", 0, tag=tag)
            return None
        threads = [
            threading.Thread(target=communicator.recv, args=(bytearray(1), 1, tag))
            for tag in (0, 1)
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.2)  # both sleep by now
        start_s = time.process_time()
        time.sleep(1)
        used_s = time.process_time() - start_s
        communicator.send(b"x", 1, tag=9)
        for thread in threads:
            thread.join()
        return used_s


def test_threads_that_wait_together_sleep(tmp_path, transport):
    used_s, _ = jobs.run(2, waiting_together, tmp_path, transport)
    assert used_s < 0.5  # of processor time, in a second in which nothing came


def resources(rank, folder, transport):
    def mine() -> tuple[int, int, int]:
        process = Path("/proc/self")
        maps = (process / "maps").read_text().count("memfd:dicomm")
        return len(list((process / "fd").iterdir())), len(list((process / "task").iterdir())), maps

    before = None
    for round_number in range(4):
        communicator = jobs.connect(folder, rank, 2, transport=transport, name=f"r{round_number}")
        communicator.send(b"x" * 100_000, 1 - rank) if rank else None
        communicator.recv(bytearray(100_000), 1 - rank) if not rank else None
        communicator.close()
        communicator.close()
        if round_number == 0:
            before = mine()
    return before, mine()


def test_close_gives_back_descriptors_threads_and_mappings(tmp_path, transport):
    for before, after in jobs.run(2, resources, tmp_path, transport):
        assert before == after
        assert after[2] == 0


def stacks() -> int:
    """How many areas of this process's memory are as large as a thread's stack."""
    limit, _ = resource.getrlimit(resource.RLIMIT_STACK)
    lines = Path("/proc/self/maps").read_text().splitlines()
    bounds = (line.split()[0].split("-") for line in lines)
    return sum(int(last, 16) - int(first, 16) == limit for first, last in bounds)


def stacks_once_connected(rank, folder, transport, world_size):
    before = stacks()
    with jobs.connect(folder, rank, world_size, transport=transport) as communicator:
        peers = [peer for peer in range(world_size) if peer != rank]
        arrived = {peer: np.zeros(1, np.uint8) for peer in peers}
        receives = [communicator.irecv(arrived[peer], peer) for peer in peers]
        sends = [communicator.isend(np.full(1, rank, np.uint8), peer) for peer in peers]
        for request in receives + sends:
            request.wait()
        time.sleep(0.2)  # they end
        return stacks() - before


def test_threads_that_connected_give_back_their_stacks(tmp_path, transport):
    counts = jobs.run(14, stacks_once_connected, tmp_path, transport, 14)
    assert max(counts) <= 9  # libc keeps a few for threads to come


def paced(rank, folder, transport):
    latency_s, bytes_per_s = 0.002, 1e6
    with jobs.connect(folder, rank, 2, transport=transport) as communicator:
        if rank == 0:
            communicator.set_link(1, latency_s, bytes_per_s)
            ready = [10_000_000_000, 0, 10_000_000_500, 10_500_000_000]
            ready[1] = ready[0]  # both ready at once: the second waits for the link
            requests = [communicator.isend(bytes(1000), 1, tag=4, ready_at_ns=at) for at in ready]
            for request in requests:
                request.wait(until_delivered=False)
            communicator.recv(bytearray(1), 1)
            return [request.delivered_at_ns for request in requests]
        delivered = []
        for _ in range(4):
            request = communicator.irecv(bytearray(1000), 0, tag=4)
            request.wait(until_delivered=False)
            delivered.append(request.delivered_at_ns)
        communicator.send(b"x", 0)
        return delivered


def test_a_paced_link_delivers_by_latency_and_bandwidth(tmp_path, transport):
    sent, received = jobs.run(2, paced, tmp_path, transport)
    base, latency, transfer = 10_000_000_000, 2_000_000, 1_000_000
    expected = [
        base + transfer + latency,
        base + 2 * transfer + latency,
        base + 3 * transfer + latency,
        base + 500_000_000 + transfer + latency,
    ]
    assert sent == received == expected


def test_memory_is_declared_by_a_descriptor_that_its_owner_may_close(tmp_path, transport):
    communicator = jobs.connect(str(tmp_path), 0, 1, transport=transport)
    memory = np.zeros(1 << 16, dtype=np.uint8)
    descriptor = os.memfd_create("chip")
    communicator.declare_memory(memory.ctypes.data, memory.nbytes, dmabuf_fd=descriptor)
    os.close(descriptor)
    communicator.forget_memory(memory.ctypes.data, memory.nbytes)
    files = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert not [file for file in files if "memfd:chip" in file]
    with pytest.raises(dicomm.Error, match=f"dmabuf_fd is {descriptor}, expected an open desc"):
        communicator.declare_memory(memory.ctypes.data, memory.nbytes, dmabuf_fd=descriptor)
    communicator.close()
