"""A peer that knows the job's secret and means harm: it is cut off, and the error names it."""

from __future__ import annotations

import array
import fcntl
import hashlib
import hmac
import os
import re
import socket
import struct
import threading
from pathlib import Path

import jobs
import pytest

import dicomm

MAGIC, VERSION = b"dicommhs", 6
CARD = struct.pack("<II", 0, 1).ljust(528, b"\0")  # of TCP, with DICOMM_SECURITY=none
WELCOME = (1).to_bytes(4, "little")
EAGER, OFFER = 1, 2
F_ADD_SEALS, SHRINK, GROW, SEAL = 1033, 2, 4, 1


@pytest.fixture(autouse=True)
def plain_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DICOMM_SECURITY", "none")


def hello(rank: int, to_rank: int) -> bytes:
    name = hashlib.sha256(b"default").digest()
    return struct.pack(
        "<8s6i32s32s64s64s", MAGIC, VERSION, rank, to_rank, 2, 7, 0, name, b"n", b"hostile", b"here"
    )


def proof(role: bytes, *words: bytes) -> bytes:
    return hmac.digest(jobs.SECRET.encode(), role + b"".join(words), "sha256")


def dial(folder: Path) -> socket.socket:
    """A proven connection with rank 0, as rank 1, over TCP."""
    words = jobs.contact(folder, 0)
    caller = socket.create_connection((words[4], int(words[5])), timeout=20)
    caller.sendall(mine := hello(1, 0))
    theirs = caller.recv(224, socket.MSG_WAITALL)
    caller.sendall(CARD + proof(b"dialler", mine, theirs, CARD))
    verdict = caller.recv(36 + len(CARD), socket.MSG_WAITALL)
    assert verdict.startswith(WELCOME)
    return caller


def frame(
    kind: int, tag: int = 0, length: int = 0, number: int = 0, *, long: bool = False
) -> bytes:
    """A header: magic, kind, whether it is long, credit, tag, bytes, id; address, delivered at."""
    words = struct.pack("<HBBIQQQ", 0x4344, kind, long, 0, tag, length, number)
    return words + bytes(16) if long else words


def eager_messages() -> list[bytes]:
    return [frame(EAGER, tag, 100_000) + bytes(100_000) for tag in range(400)]


def empty_messages() -> list[bytes]:
    return [frame(EAGER) * 1000] * 100


def offers() -> list[bytes]:
    keys = bytes(32)
    numbers = range(1, (1 << 18) + 2000)
    every = [frame(OFFER, n % 7, 1 << 20, n, long=True) + keys for n in numbers]
    return [b"".join(every[at : at + 1000]) for at in range(0, len(every), 1000)]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (eager_messages, "sent more than 4194304 bytes that nobody here had asked for"),
        (empty_messages, "sent more than 4194304 bytes that nobody here had asked for"),
        (offers, "sent more than 262144 offers that nobody here had asked for"),
    ],
)
def test_a_peer_that_sends_without_end_is_cut_off(tmp_path, words, sentence):
    with jobs.connect(tmp_path, 0, 2, transport="tcp") as communicator, dial(tmp_path) as caller:
        with pytest.raises(OSError, match=r"[Bb]roken pipe|reset"):
            for _ in range(20):  # buffers hold more than once over what a busy reader leaves
                for word in words():
                    caller.sendall(word)
        with pytest.raises(dicomm.PeerError, match=rf"hostile, pid 7.*{sentence}, and was cut off"):
            communicator.recv(bytearray(1), 1, tag=99)


def listener_as_rank_1(folder: Path) -> socket.socket:
    """Published beside the contact of rank 0, from whose host it seems to come."""
    listener = socket.socket(socket.AF_UNIX)
    listener.settimeout(20)
    name = f"dicomm-hostile-{os.getpid()}-{os.urandom(4).hex()}"
    listener.bind("\0" + name)
    listener.listen()
    words = jobs.contact(folder, 0)
    words[3] = name
    jobs.publish(folder, 1, words)
    return listener


def hand_over(listener: socket.socket, segment: int) -> None:
    caller, _ = listener.accept()
    with caller:
        theirs = caller.recv(224, socket.MSG_WAITALL)
        caller.sendall(mine := hello(1, 0))
        caller.recv(32 + len(CARD), socket.MSG_WAITALL)
        verdict = WELCOME + CARD + proof(b"acceptor", theirs, mine, WELCOME + CARD)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [segment]))
        caller.sendmsg([verdict], [rights])
        caller.settimeout(20)
        caller.recv(1)  # its end
    os.close(segment)


def own_segment(folder: Path) -> int:
    """One that rank 0 made for a caller: what a segment has to look like."""
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(20)
        caller.connect("\0" + jobs.contact(folder, 0)[3])
        caller.sendall(mine := hello(1, 0))
        theirs = caller.recv(224, socket.MSG_WAITALL)
        caller.sendall(CARD + proof(b"dialler", mine, theirs, CARD))
        _, rights, _, _ = caller.recvmsg(36 + len(CARD), socket.CMSG_SPACE(4))
    (segment,) = array.array("i", rights[0][2])
    return segment


def test_the_segment_that_a_rank_makes_can_neither_shrink_nor_be_sealed_further(tmp_path):
    with jobs.connect(tmp_path, 0, 2, transport="shm"):
        segment = own_segment(tmp_path)
        for size in (0, os.fstat(segment).st_size * 2):
            with pytest.raises(PermissionError):
                os.ftruncate(segment, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(segment, F_ADD_SEALS, 8)  # against writing
        os.close(segment)


@pytest.mark.parametrize("seals", [0, GROW | SEAL, SHRINK | GROW])
def test_a_segment_that_its_maker_can_take_away_is_refused(tmp_path, seals):
    (tmp_path / "another").mkdir()
    with jobs.connect(tmp_path / "another", 0, 2, transport="shm"):
        with_right_size = own_segment(tmp_path / "another")
    segment = os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(segment, os.fstat(with_right_size).st_size)
    os.close(with_right_size)
    fcntl.fcntl(segment, F_ADD_SEALS, seals)
    with (
        jobs.connect(tmp_path, 0, 2, transport="shm") as communicator,
        listener_as_rank_1(tmp_path) as listener,
    ):
        thread = threading.Thread(target=hand_over, args=(listener, segment))
        thread.start()
        sentence = re.escape("the peer's shared memory is not sealed")
        with pytest.raises(dicomm.PeerError, match=f"rank 1 .*{sentence}"):
            communicator.send(b"x", 1)
        thread.join()


def unexpected(rank, folder, transport):
    """More messages than may wait unasked, each way; received from the last to the first."""
    lengths = [3000, 0, 8, 60_000, 2 << 20]
    with jobs.connect(folder, rank, 2, transport=transport) as communicator:
        peer = 1 - rank
        data = [bytes([rank + 1]) * lengths[i % 5 if i < 100 else 0] for i in range(3000)]
        sends = [communicator.isend(word, peer, tag=i) for i, word in enumerate(data)]
        buffer = bytearray(max(lengths))
        for i in reversed(range(len(data))):
            assert communicator.recv(buffer, peer, tag=i) == len(data[i])
            if data[i]:
                assert buffer[len(data[i]) - 1] == peer + 1
        for send in sends:
            send.wait()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_peer_may_send_as_much_as_it_likes_before_it_is_received(tmp_path, transport):
    jobs.run(2, unexpected, tmp_path, transport)
