"""Callers that are no rank of the job: they get nothing and delay nobody."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jobs
import pytest

import dicomm

MAGIC = b"dicommhs"
HELLO = (MAGIC + (2).to_bytes(4, "little")).ljust(224, b"\0")  # well-formed, of nobody
CARD = bytes(528)  # of a transport that has nothing to tell


def contact(folder, rank):
    words = dicomm.FileStore(folder).get(f"dicomm/default/{rank}", 10).decode().split()
    return words[3], (words[4], int(words[5]))  # local name, TCP address


def call(folder, rank, transport):
    local, address = contact(folder, rank)
    if transport == "tcp":
        return socket.create_connection(address, timeout=10)
    caller = socket.socket(socket.AF_UNIX)
    caller.settimeout(10)
    caller.connect("\0" + local)
    return caller


def pair(folder, transport):
    return [jobs.connect(folder, rank, 2, transport=transport) for rank in range(2)]


def exchange(communicators):
    request = communicators[1].irecv(buffer := bytearray(5), 0)
    communicators[0].send(b"hello", 1)
    assert request.wait() == 5 and buffer == b"hello"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    "words", [b"GET / HTTP/1.1\r\n\r\n", bytes(1000), MAGIC + b"\xff" * 1000, os.urandom(300)]
)
def test_garbage_is_hung_up_on(tmp_path, transport, words):
    communicators = pair(tmp_path, transport)
    with call(tmp_path, 0, transport) as stranger:
        stranger.sendall(words)
        assert received_until_end(stranger) == b""
    exchange(communicators)
    for communicator in communicators:
        communicator.close()


def received_until_end(stranger):
    data = b""
    try:
        while more := stranger.recv(4096):
            data += more
    except ConnectionResetError:
        pass
    return data


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_well_formed_hello_without_the_secret_gets_a_nonce_and_no_more(tmp_path, transport):
    communicators = pair(tmp_path, transport)
    with call(tmp_path, 0, transport) as stranger:
        stranger.sendall(HELLO + os.urandom(len(CARD) + 32))
        answer = received_until_end(stranger)
    assert len(answer) == 224 and answer.startswith(MAGIC)
    assert jobs.SECRET.encode() not in answer
    exchange(communicators)
    for communicator in communicators:
        communicator.close()


@pytest.mark.parametrize("wrong_bit", [0, 1])
def test_the_proof_is_hmac_sha256_of_both_hellos(tmp_path, wrong_bit):
    communicators = pair(tmp_path, "tcp")
    name = hashlib.sha256(b"default").digest()
    mine = struct.pack("<8s6i32s32s64s64s", MAGIC, 2, 1, 0, 2, 0, 0, name, b"n", b"me", b"here")

    def proof(role: bytes, theirs: bytes, extra: bytes = b"") -> bytes:
        return hmac.digest(jobs.SECRET.encode(), role + mine + theirs + extra, "sha256")

    with call(tmp_path, 0, "tcp") as caller:
        caller.sendall(mine)
        theirs = caller.recv(224, socket.MSG_WAITALL)
        mine_proof = bytearray(CARD + proof(b"dialler", theirs, CARD))
        mine_proof[-1] ^= wrong_bit
        caller.sendall(mine_proof)
        verdict = caller.recv(36 + len(CARD), socket.MSG_WAITALL)
        if wrong_bit:
            assert verdict == b""
            exchange(communicators)
        else:
            welcome = (1).to_bytes(4, "little")
            assert verdict == welcome + CARD + proof(b"acceptor", theirs, welcome + CARD)
            # A frame that is none ends the connection, and the error says why.
            caller.sendall(b"\xee" * 56)
            with pytest.raises(dicomm.PeerError, match="malformed frame"):
                communicators[0].recv(bytearray(1), 1)
    for communicator in communicators:
        communicator.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_slow_and_silent_callers_delay_nobody(tmp_path, transport):
    communicators = pair(tmp_path, transport)
    strangers = []
    for i in range(600):  # more than are kept waiting at once
        strangers.append(call(tmp_path, i % 2, transport))
        if i % 3:
            strangers[-1].send(MAGIC[: i % 3])
    exchange(communicators)
    latest = strangers[-1]
    latest.setblocking(False)
    with pytest.raises(BlockingIOError):  # not hung up on: nobody waited for its deadline
        latest.recv(1)
    latest.settimeout(10)
    for communicator in communicators:
        communicator.close()
    for stranger in strangers:
        assert received_until_end(stranger) == b""
        stranger.close()


WORDS: list[Callable[[], bytes]] = [
    lambda: b"",
    lambda: MAGIC[:3],
    lambda: os.urandom(500),
    lambda: HELLO,  # a hello, and silence
    lambda: HELLO + os.urandom(len(CARD) + 32),
]


class Strangers:
    """Callers who never hang up; from raised() on they go on talking, byte by byte."""

    def __init__(self, folder: Path, transport: str) -> None:
        self.folder, self.transport = folder, transport
        self.sockets: list[socket.socket] = []
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.drip)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < 4096:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))

    def __enter__(self) -> Strangers:
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        if self.thread.is_alive():
            self.thread.join()
        for stranger in self.sockets:
            stranger.close()

    def call(self, rank: int, count: int) -> None:
        local, address = contact(self.folder, rank)
        tcp = self.transport == "tcp"
        for i in range(count):
            stranger = socket.socket(socket.AF_INET if tcp else socket.AF_UNIX)
            self.sockets.append(stranger)
            stranger.setblocking(False)
            stranger.connect_ex(address if tcp else "\0" + local)
            with contextlib.suppress(OSError):
                stranger.send(WORDS[i % len(WORDS)]())

    def drip(self) -> None:
        while not self.over.wait(0.001):
            for stranger in self.sockets[::10]:
                with contextlib.suppress(OSError):
                    stranger.send(b"\0")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_thousand_callers_delay_no_meeting_and_no_exchange(tmp_path, transport):
    communicators = pair(tmp_path, transport)
    with Strangers(tmp_path, transport) as strangers:
        for rank in range(2):
            strangers.call(rank, 500)
        strangers.thread.start()
        exchange(communicators)  # they meet only now
        for i in range(200):
            data = os.urandom(i * 500)
            request = communicators[0].irecv(buffer := bytearray(len(data)), 1, tag=i)
            communicators[1].send(data, 0, tag=i, timeout_s=10)
            assert request.wait(timeout_s=10) == len(data) and buffer == data
    for communicator in communicators:
        communicator.close()


def slow_to_accept(rank, folder, transport):
    with jobs.connect(folder, 0, 2, transport=transport) as communicator:
        buffer = bytearray(5)
        assert communicator.recv(buffer, 1) == 5 and buffer == b"hello"
        communicator.send(b"x", 1)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_rank_in_the_midst_of_a_thousand_waiting_callers_gets_through(tmp_path, transport):
    with (
        jobs.Job(1, slow_to_accept, tmp_path, transport) as job,
        Strangers(tmp_path, transport) as strangers,
    ):
        contact(tmp_path, 0)  # it listens
        pid = job.processes[0].pid
        os.kill(pid, signal.SIGSTOP)
        strangers.call(0, 500)
        with jobs.connect(tmp_path, 1, 2, transport=transport) as communicator:
            request = communicator.isend(b"hello", 0)
            time.sleep(0.3)  # its call is in the queue
            strangers.call(0, 500)
            os.kill(pid, signal.SIGCONT)
            assert request.wait(timeout_s=20) == 5
            communicator.recv(bytearray(1), 0, timeout_s=20)
        job.result(0)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_rank_with_another_secret_is_an_error_on_both_sides_and_no_payload_passes(
    tmp_path, transport
):
    right = jobs.connect(tmp_path, 0, 2, transport=transport)
    wrong = jobs.connect(tmp_path, 1, 2, transport=transport, secret="another")
    buffer = bytearray(3)
    with pytest.raises(dicomm.PeerError, match="secrets differ"):
        wrong.send(b"abc", 0)
    wrong.close()
    receive = right.irecv(buffer, dicomm.ANY_SOURCE)
    with pytest.raises(dicomm.TimeoutError, match="does not know this job's secret"):
        receive.wait(timeout_s=0.3)
    assert buffer == bytes(3)
    right.close()


def test_an_empty_secret_and_impossible_ranks_are_refused(tmp_path):
    store = dicomm.FileStore(tmp_path)
    with pytest.raises(dicomm.Error, match="secret is empty"):
        dicomm.Communicator(0, 2, store, secret="")
    with pytest.raises(dicomm.Error, match="0 <= rank < world_size"):
        dicomm.Communicator(2, 2, store, secret="x")
    with pytest.raises(dicomm.Error, match="expected auto, shm, tcp or verbs"):
        dicomm.Communicator(0, 2, store, secret="x", transport="pigeon")
    with dicomm.Communicator(0, 2, store, secret="x") as communicator:
        for peer in (0, 2, -2):
            with pytest.raises(dicomm.Error, match="is not another rank"):
                communicator.isend(b"x", peer)


def test_a_store_entry_of_another_program_is_named(tmp_path):
    dicomm.FileStore(tmp_path).set("dicomm/default/1", b"\xff nonsense")
    with (
        jobs.connect(tmp_path, 0, 2) as communicator,
        pytest.raises(dicomm.PeerError, match="the store's entry for rank 1"),
    ):
        communicator.send(b"x", 1)
