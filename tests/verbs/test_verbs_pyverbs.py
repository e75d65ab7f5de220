"""dicomm and pyverbs on the two ends of a queue pair."""

import hashlib
import json
import struct
import subprocess
from pathlib import Path

import jobs
import numpy as np
import pytest
from verbs_ranks import connect

import dicomm

PEER = Path(__file__).with_name("pyverbs_peer.py")
TIMEOUT_S = 15.0


def pattern(length, seed):
    """The peer's own, which shares no module with us."""
    return np.frombuffer(hashlib.shake_256(str(seed).encode()).digest(length), np.uint8)


class Peer:
    def __init__(self, scenario, folder):
        self.process = subprocess.Popen(
            ["/usr/bin/python3", PEER, scenario, folder, jobs.SECRET],
            env={"PATH": "/usr/bin:/bin"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        print(self.process.communicate()[1])  # why, where the test failed

    def seen(self):
        out, errors = self.process.communicate(timeout=jobs.DEADLINE_S)
        assert self.process.returncode == 0, errors
        return json.loads(out)


def test_short_and_long_messages_both_ways(tmp_path):
    short, long = pattern(1000, 5), pattern(3_000_001, 6)
    from_peer, reads = np.zeros(5000, np.uint8), np.zeros(2_000_003, np.uint8)
    with Peer("exchange", tmp_path) as peer:
        with connect(tmp_path, 1, 2, timeout_s=60) as communicator:
            communicator.send(short, 0, tag=5)
            communicator.send(long, 0, tag=6)
            communicator.recv(from_peer, 0, tag=7)
            communicator.recv(reads, 0, tag=8)
            for number in range(1000):
                word = bytearray(8)
                communicator.recv(word, 0, tag=9)
                assert struct.unpack("<Q", word) == (number,)
        seen = peer.seen()
    assert seen["short"] == [5, hashlib.sha256(short).hexdigest()]
    assert seen["long"] == [6, hashlib.sha256(long).hexdigest()]
    assert np.array_equal(from_peer, pattern(5000, 7))
    assert np.array_equal(reads, pattern(2_000_003, 8))


def test_who_calls_by_rdma_cm_without_the_nonce_is_refused_and_delays_nobody(tmp_path):
    buffer = np.zeros(5000, np.uint8)
    with Peer("strangers", tmp_path) as peer:
        with connect(tmp_path, 1, 2, timeout_s=60) as communicator:
            communicator.recv(buffer, 0, tag=7)
        accepted = peer.seen()
    assert accepted == [False] * 9 + [True]
    assert np.array_equal(buffer, pattern(5000, 7))


def receive_flood(_, folder):
    with connect(folder, 1, 2, timeout_s=60) as communicator:
        communicator.recv(bytearray(1), 0, tag=2)  # the last: all others have come unexpected
        buffer = np.zeros(4000, np.uint8)
        for number in range(1000):
            communicator.recv(buffer, 0, tag=1)
            assert np.array_equal(buffer, pattern(4000, number)), number


def test_a_flood_of_the_receive_buffers_loses_nothing(tmp_path):
    with Peer("flood", tmp_path) as peer, jobs.Job(1, receive_flood, tmp_path) as job:
        job.result(0)
        peer.seen()


def send_for_ever(communicator):
    while True:
        communicator.send(bytes(4000), 0)


def receive_one(communicator):
    communicator.recv(bytearray(1 << 20), 0, tag=1)


def receive_many(communicator):
    for _ in range(1000):
        communicator.recv(bytearray(4000), 0, tag=1)


def error_of(_, folder, use):
    # By default what finds no receive buffer is sent again until the request's deadline.
    with (
        connect(folder, 1, 2, timeout_s=TIMEOUT_S, rnr_retry=6) as communicator,
        pytest.raises(dicomm.PeerError) as raised,
    ):
        use(communicator)
    return str(raised.value)


@pytest.mark.parametrize(
    ("scenario", "use", "words"),
    [
        ("no_buffers", send_for_ever, "receive buffers ran out"),
        ("over_window", receive_many, "over its window"),
        ("wrong_key", receive_one, "remote access error"),
    ],
)
def test_a_peer_that_breaks_the_rules_is_a_named_error(tmp_path, scenario, use, words):
    with Peer(scenario, tmp_path), jobs.Job(1, error_of, tmp_path, use) as job:
        text = job.result(0)
    assert "rank 0" in text and words in text
