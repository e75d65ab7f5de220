"""What the others learn when a rank dies, a cable is pulled, or one of two rails fails."""

import re
import time
from pathlib import Path

import jobs
import numpy as np
import pytest
from verbs_ranks import TWO_RAILS, connect

import dicomm

TIMEOUT_S = 20.0
PIECE = 1 << 20


def pattern(length, seed):
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


def until_it_fails(rank, folder, size):
    """Rank 1 receives what rank 0 sends, for ever; (the error's type and text, seconds)."""
    data = np.zeros(size, np.uint8)
    with connect(folder, rank, 2, timeout_s=TIMEOUT_S) as communicator:
        try:
            for number in range(1 << 30):
                start = time.monotonic()
                if rank == 0:
                    communicator.send(data, 1)
                else:
                    communicator.recv(data, 0)
                if number == 5 and rank == 1:
                    Path(folder, "go").touch()
        except dicomm.Error as error:
            return type(error).__name__, str(error), time.monotonic() - start


@pytest.mark.parametrize("size", [8, 8 * PIECE])
def test_a_killed_rank_is_named(tmp_path, size):
    with jobs.Job(2, until_it_fails, tmp_path, size) as job:
        jobs.wait_for_file(tmp_path / "go")
        pid = job.processes[0].pid
        job.kill(0)
        kind, text, waited_s = job.result(1)
    assert kind == "PeerError"
    assert "rank 0" in text and f"pid {pid}" in text and "died" in text, text
    assert waited_s < TIMEOUT_S


@pytest.mark.parametrize("size", [8, 8 * PIECE])
def test_without_its_only_cable_each_rank_names_the_rail_and_the_peer(tmp_path, unplug, size):
    with jobs.Job(2, until_it_fails, tmp_path, size) as job:
        jobs.wait_for_file(tmp_path / "go")
        unplug("eth0")
        ended = [job.result(rank) for rank in range(2)]
    for rank, (kind, text, waited_s) in enumerate(ended):
        assert kind == "PeerError", text
        assert f"rank {1 - rank}" in text and re.search("rxe[01]", text), text
        assert waited_s < TIMEOUT_S + 5


def over_two_rails(rank, folder, pieces, size):
    """Rank 0 sends numbered pieces, rank 1 checks each and echoes a short word."""
    with connect(folder, rank, 2, rails=TWO_RAILS, timeout_s=60) as communicator:
        for number in range(pieces):
            buffer, word = np.zeros(size, np.uint8), bytearray(8)
            if rank == 0:
                communicator.send(pattern(size, number), 1)
                communicator.recv(word, 1)
                assert int.from_bytes(word, "little") == number
            else:
                communicator.recv(buffer, 0)
                assert np.array_equal(buffer, pattern(size, number)), number
                communicator.send(number.to_bytes(8, "little"), 0)
            if number == pieces // 4 and rank == 1:
                Path(folder, "go").touch()
        return communicator.bytes_sent(1 - rank)


@pytest.mark.parametrize("interface", ["eth0", "eth2"])
@pytest.mark.parametrize(("pieces", "size"), [(3000, 2000), (12, 16 * PIECE)])
def test_two_rails_lose_nothing_when_one_is_pulled(tmp_path, unplug, interface, pieces, size):
    with jobs.Job(2, over_two_rails, tmp_path, pieces, size) as job:
        jobs.wait_for_file(tmp_path / "go")
        unplug(interface)
        assert [job.result(0), job.result(1)] == [pieces * size, pieces * 8]
