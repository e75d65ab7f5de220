"""What the others learn when a rank dies, aborts, leaves or is late."""

import math
import re
import time
from pathlib import Path

import jobs
import numpy as np
import pytest

import dicomm

pytestmark = pytest.mark.parametrize("transport", ["shm", "tcp"])
HUGE = 512 << 20


def named_shared_memory(pid: int) -> list[str]:
    """The shared memory of a process that has a name, and so would outlive a killed owner."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    shared = [line.split(maxsplit=5)[-1] for line in maps if line.split()[1] == "rw-s"]
    return [at for at in shared if at.startswith("/") and not at.endswith(" (deleted)")]


def deadline(rank, folder, transport):
    with jobs.connect(folder, rank, 2, transport=transport) as communicator:
        communicator.send(b"x", 1 - rank)
        communicator.recv(bytearray(1), 1 - rank)
        if rank == 1:
            communicator.recv(bytearray(1), 0)
            return None
        texts = []
        buffer = bytearray(100)
        request = communicator.irecv(buffer, 1, tag=17)
        for _ in range(2):  # it stays in flight, and may be waited for again
            with pytest.raises(dicomm.TimeoutError) as raised:
                request.wait(timeout_s=0.3)
            texts.append(str(raised.value))
        assert isinstance(raised.value, TimeoutError) and isinstance(raised.value, dicomm.Error)
        assert not request.test()
        big = communicator.isend(bytes(4 << 20), 1, tag=18)
        with pytest.raises(dicomm.TimeoutError) as raised:
            big.wait(timeout_s=0.3)
        texts.append(str(raised.value))
        communicator.send(b"x", 1)
        return texts


def test_a_wait_ends_at_its_deadline_and_says_what_it_waited_for(tmp_path, transport):
    texts = jobs.run(2, deadline, tmp_path, transport)[0]
    assert "rank 1" in texts[0] and "tag 17" in texts[0] and "100 bytes" in texts[0]
    assert "rank 1" in texts[2] and "tag 18" in texts[2] and f"{4 << 20} bytes" in texts[2]


def wait_for_ever(rank, folder, transport):
    with jobs.connect(folder, rank, 2, transport=transport, timeout_s=math.inf) as communicator:
        for tag, timeout_s in enumerate((None, math.inf, 1e10)):
            if rank == 1:
                time.sleep(0.3)
                communicator.send(b"x", 0, tag=tag)
            else:
                communicator.recv(bytearray(1), 1, tag=tag, timeout_s=timeout_s)
    with pytest.raises(dicomm.Error, match="timeout_s is nan, expected a number of seconds"):
        jobs.connect(folder, rank, 2, transport=transport, timeout_s=math.nan)


def test_a_wait_without_end_waits(tmp_path, transport):
    jobs.run(2, wait_for_ever, tmp_path, transport)


def say_much(rank, folder, transport):
    label = f"rank {rank} ({'芯' * 20})"
    with jobs.connect(folder, rank, 2, transport=transport, rank_label=label) as communicator:
        communicator.send(b"x", 1 - rank)
        communicator.recv(bytearray(1), 1 - rank)
        if rank == 1:
            communicator.recv(bytearray(1), 0)
            return communicator.abort("é" * 3000)
        texts = []
        for timeout_s in (0.1, 20):
            with pytest.raises(dicomm.Error) as raised:
                communicator.recv(bytearray(8), 1, tag=1, timeout_s=timeout_s)
            texts.append(str(raised.value))
            if len(texts) == 1:
                communicator.send(b"x", 1)
        return texts


def test_words_that_no_field_can_hold_are_cut_between_characters(tmp_path, transport):
    timed_out, aborted = jobs.run(2, say_much, tmp_path, transport)[0]
    assert "rank 1 (芯芯" in timed_out and "not done after" in timed_out
    assert "rank 1 (芯芯" in aborted and "aborted: éé" in aborted and aborted.endswith("é")


def absent(rank, folder, transport):
    with (
        jobs.connect(folder, rank, 2, transport=transport) as communicator,
        pytest.raises(dicomm.TimeoutError, match="not connected yet"),
    ):
        communicator.recv(bytearray(1), 1, timeout_s=0.5)


def test_a_rank_that_never_comes_is_a_timeout(tmp_path, transport):
    assert jobs.run(1, absent, tmp_path, transport) == [None]


def victim_in_mid_transfer(rank, folder, transport):
    """0 and 1 exchange; 2 waits for 1 and never meets 0; then 0 is killed."""
    label = f"rank {rank} (chip {'ABC'[rank]})"
    communicator = jobs.connect(folder, rank, 3, transport=transport, rank_label=label)
    if rank == 2:
        communicator.send(b"x", 1)
        with pytest.raises(dicomm.PeerError) as raised:
            communicator.recv(bytearray(8), 1, tag=5)
        return str(raised.value)
    if rank == 1:
        communicator.recv(bytearray(1), 2)
        communicator.recv(bytearray(1), 0)
        Path(folder, "go").touch()
        buffer = np.zeros(HUGE, np.uint8)
        with pytest.raises(dicomm.PeerError) as raised:
            while True:
                communicator.recv(buffer, 0, tag=1)
        return str(raised.value)
    communicator.send(b"x", 1)
    data = np.zeros(HUGE, np.uint8)
    while True:
        communicator.send(data, 1, tag=1)


def test_kill_in_mid_transfer_is_named_by_peers_and_third_parties(tmp_path, transport):
    with jobs.Job(3, victim_in_mid_transfer, tmp_path, transport) as job:
        jobs.wait_for_file(tmp_path / "go")
        time.sleep(0.05)
        pids = [process.pid for process in job.processes]
        assert [named_shared_memory(pid) for pid in pids] == [[], [], []]
        job.kill(0)
        direct, third = job.result(1), job.result(2)
    for text in (direct, third):
        assert "rank 0 (chip A)" in text and f"pid {pids[0]}" in text and "died" in text
    assert "recv of up to 536870912 bytes" in direct and " s: " in direct
    assert "from rank 1 (chip B)" in third and "tag 5" in third


def killed_before_connecting(rank, folder, transport):
    communicator = jobs.connect(folder, rank, 2, transport=transport)
    if rank == 0:
        Path(folder, "published").touch()
        time.sleep(jobs.DEADLINE_S)
    jobs.wait_for_file(Path(folder, "killed"))
    with pytest.raises(dicomm.PeerError, match="rank 0 died or left before it was connected") as e:
        communicator.recv(bytearray(1), 0)
    listens = r"\(it listens at [0-9.]+:\d+, this rank at [0-9.]+:\d+\)"
    assert re.search(listens, str(e.value))


def test_kill_before_the_first_connection(tmp_path, transport):
    with jobs.Job(2, killed_before_connecting, tmp_path, transport) as job:
        jobs.wait_for_file(tmp_path / "published")
        job.kill(0)
        (tmp_path / "killed").touch()
        job.result(1)


def aborting(rank, folder, transport):
    communicator = jobs.connect(folder, rank, 3, transport=transport)
    if rank == 0:
        communicator.recv(bytearray(1), 1)
        pending = communicator.irecv(bytearray(1), 1, tag=8)
        communicator.abort("the loss is not a number")
        with pytest.raises(dicomm.AbortedError, match="the loss is not a number") as raised:
            pending.wait()
        with pytest.raises(dicomm.AbortedError):
            communicator.send(b"x", 1)
        time.sleep(0.2)
        communicator.close()
        return str(raised.value)
    if rank == 1:
        communicator.recv(bytearray(1), 2)
        communicator.send(b"x", 0)
        peer = 0
    else:
        communicator.send(b"x", 1)
        peer = 1
    with pytest.raises(dicomm.PeerError) as raised:
        communicator.recv(bytearray(1), peer, tag=8)
    with pytest.raises(dicomm.PeerError):
        communicator.send(b"x", peer)
    return str(raised.value)


def test_abort_reaches_every_rank_with_its_reason(tmp_path, transport):
    texts = jobs.run(3, aborting, tmp_path, transport)
    for text in texts[1:]:
        assert "rank 0" in text and "aborted: the loss is not a number" in text


def leaving(rank, folder, transport):
    with jobs.connect(folder, rank, 3, transport=transport) as communicator:
        if rank == 0:  # the last words of a leaving rank arrive
            communicator.send(b"123", 1, tag=1)
            communicator.send(b"45", 1, tag=2)
            return None
        if rank == 2:
            communicator.recv(bytearray(1), 1)
            communicator.send(b"x", 1)
            return None
        with pytest.raises(dicomm.PeerError, match=r"rank 0.* left") as raised:
            communicator.recv(bytearray(1), 0, tag=3)
        assert "died" not in str(raised.value)
        buffer = bytearray(3)
        assert communicator.recv(buffer, 0, tag=2) == 2
        assert communicator.recv(buffer, 0, tag=1) == 3
        assert buffer == b"123"
        communicator.send(b"x", 2)  # the others go on
        communicator.recv(buffer, 2)


def test_leaving_is_not_dying(tmp_path, transport):
    jobs.run(3, leaving, tmp_path, transport)


def killed_any_time(rank, folder, transport, delay_s):
    communicator = jobs.connect(folder, rank, 2, transport=transport)
    if rank == 0:
        Path(folder, "go").touch()
    data = np.zeros(100_000, np.uint8)
    buffer = np.zeros(100_000, np.uint8)
    with pytest.raises(dicomm.PeerError, match=r"rank 0.* died"):
        while True:
            for length in (8, 5000, 100_000):
                requests = [
                    communicator.irecv(buffer[:length], 1 - rank),
                    communicator.isend(data[:length], 1 - rank),
                ]
                for request in requests:
                    request.wait()


def test_kill_at_many_moments_never_hangs_a_peer(tmp_path, transport):
    for i, delay_s in enumerate([0.0, 0.001, 0.003, 0.01, 0.03, 0.1]):
        folder = tmp_path / str(i)
        folder.mkdir()
        with jobs.Job(2, killed_any_time, folder, transport, delay_s) as job:
            jobs.wait_for_file(folder / "go")
            time.sleep(delay_s)
            job.kill(0)
            job.result(1)
