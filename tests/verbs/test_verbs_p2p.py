"""Messages between two processes over one RDMA rail."""

import hashlib

import jobs
import numpy as np
from verbs_ranks import connect, packets_sent

SIZES = [0, 1, 7, 8, 4096, 8191, 8192, 8193, 16384, 16385, 65536, 262145, 1 << 20, (5 << 20) + 3]
LARGEST = 64 << 20
IN_FLIGHT = 4000


def pattern(length, seed):
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


def echo(communicator, rank, sizes, offset):
    """Every size there and back, between buffers `offset` bytes off a page."""
    for length in sizes:
        expected = pattern(length, length)
        memory = np.zeros(length + 2 * offset + 4096, np.uint8)
        start = -memory.ctypes.data % 4096 + offset
        memory = np.zeros(length + start + 8, np.uint8) if memory.size < start + length else memory
        buffer = memory[start : start + length]
        if rank == 0:
            buffer[:] = expected
            communicator.send(buffer, 1, tag=length)
            buffer[:] = 0
            assert communicator.recv(buffer, 1, tag=length) == length
        else:
            assert communicator.recv(buffer, 0, tag=length) == length
            communicator.send(buffer, 0, tag=length)
        assert np.array_equal(buffer, expected), (length, offset)
        assert not memory[:start].any() and not memory[start + length :].any(), (length, offset)


def every_size(rank, folder):
    before = packets_sent(f"rxe{rank}")
    with connect(folder, rank, 2) as communicator:
        for offset in (0, 1, 13):
            echo(communicator, rank, SIZES, offset)
        echo(communicator, rank, [LARGEST], 0)
        echo(communicator, rank, [LARGEST - 5], 3)
    return packets_sent(f"rxe{rank}") - before


def test_every_size_arrives_aligned_or_not_and_over_the_device(tmp_path):
    sent = jobs.run(2, every_size, tmp_path)
    assert sum(sent) * 4096 > 2 * (LARGEST + LARGEST - 5)  # bytes, at the largest MTU


def thousands(rank, folder):
    """Both ranks send all before either receives, and receive in another order."""
    lengths = [int(n) for n in np.random.default_rng(5).integers(0, 3000, IN_FLIGHT)]
    for number in range(0, IN_FLIGHT, 400):
        lengths[number] = 100_000 + number  # some are long
    with connect(folder, rank, 2, timeout_s=60) as communicator:
        mine = [pattern(length, 2 * number + rank) for number, length in enumerate(lengths)]
        sends = [
            communicator.isend(data, 1 - rank, tag=number % 7) for number, data in enumerate(mine)
        ]
        arrived = {number: np.zeros(length, np.uint8) for number, length in enumerate(lengths)}
        for tag in (3, 0, 6, 1, 5, 2, 4):  # within a tag in order, the tags in any
            receives = [
                communicator.irecv(arrived[number], 1 - rank, tag=tag)
                for number in range(tag, IN_FLIGHT, 7)
            ]
            for request in receives:
                request.wait()
        for request in sends:
            request.wait()
        for number, length in enumerate(lengths):
            assert np.array_equal(arrived[number], pattern(length, 2 * number + 1 - rank)), number


def test_thousands_in_flight_and_received_in_another_order(tmp_path):
    jobs.run(2, thousands, tmp_path)


def four_ranks(rank, folder):
    """Everybody with everybody, also two ranks on one device."""
    with connect(folder, rank, 4, timeout_s=60) as communicator:
        others = [peer for peer in range(4) if peer != rank]
        data = {peer: pattern(700_000, 10 * rank + peer) for peer in others}
        buffers = {peer: np.zeros(700_000, np.uint8) for peer in others}
        receives = [communicator.irecv(buffers[peer], peer) for peer in others]
        sends = [communicator.isend(data[peer], peer) for peer in others]
        for request in receives + sends:
            request.wait()
        return [
            hashlib.sha256(buffers[peer]).digest()
            == hashlib.sha256(pattern(700_000, 10 * peer + rank)).digest()
            for peer in others
        ]


def test_four_ranks_each_with_each(tmp_path):
    assert jobs.run(4, four_ranks, tmp_path) == [[True] * 3] * 4


def declared(rank, folder):
    """Messages from and to declared memory; how many packets declaring it took by itself."""
    segment = np.zeros(3 << 20, np.uint8)
    with connect(folder, rank, 2) as communicator:
        before = packets_sent(f"rxe{rank}")
        communicator.declare_memory(segment.ctypes.data, segment.nbytes)
        probed = packets_sent(f"rxe{rank}") - before
        assert not segment.any()
        if rank == 0:
            segment[:] = pattern(segment.size, 9)
            communicator.send(segment[7:], 1)
        else:
            communicator.recv(segment[7:], 0)
        assert np.array_equal(segment[7:], pattern(segment.size, 9)[7:])
        communicator.forget_memory(segment.ctypes.data, segment.nbytes)
    return probed


def test_declared_memory_is_probed_by_the_device_itself(tmp_path, capfd):
    assert min(jobs.run(2, declared, tmp_path)) > 0
    assert "cannot reach" not in capfd.readouterr().err
