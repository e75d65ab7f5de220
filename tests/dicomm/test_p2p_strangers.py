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
from collections.abc import Callable, Sequence
from pathlib import Path

import jobs
import pytest

import dicomm

MAGIC, VERSION = b"dicommhs", 6
HELLO = (MAGIC + VERSION.to_bytes(4, "little")).ljust(224, b"\0")  # well-formed, of nobody
CARD = bytes(528)  # of a transport that has nothing to tell
UNPROVEN = (7).to_bytes(4, "little") + CARD + bytes(32)  # a verdict that proves nothing, either


def contact(folder, rank):
    words = jobs.contact(folder, rank)
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
        answer = received_until_end(stranger)
    if words.startswith(MAGIC):  # of another version, which it is told
        assert len(answer) == 224 and answer.startswith(HELLO[:12])
    else:
        assert answer == b""
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
def test_a_well_formed_hello_without_the_secret_gets_a_nonce_and_a_refusal(tmp_path, transport):
    communicators = pair(tmp_path, transport)
    with call(tmp_path, 0, transport) as stranger:
        stranger.sendall(HELLO + os.urandom(len(CARD) + 32))
        answer = received_until_end(stranger)
    assert len(answer) == 224 + len(UNPROVEN) and answer.startswith(MAGIC)
    assert answer.endswith(UNPROVEN)
    assert jobs.SECRET.encode() not in answer
    exchange(communicators)
    for communicator in communicators:
        communicator.close()


@pytest.mark.parametrize("wrong_bit", [0, 1])
def test_the_proof_is_hmac_sha256_of_both_hellos(tmp_path, monkeypatch, wrong_bit):
    monkeypatch.setenv("DICOMM_SECURITY", "none")
    card = struct.pack("<II", 0, 1).ljust(len(CARD), b"\0")  # which says the same
    communicators = pair(tmp_path, "tcp")
    name = hashlib.sha256(b"default").digest()
    mine = struct.pack(
        "<8s6i32s32s64s64s", MAGIC, VERSION, 1, 0, 2, 0, 0, name, b"n", b"me", b"here"
    )

    def proof(role: bytes, theirs: bytes, extra: bytes = b"") -> bytes:
        return hmac.digest(jobs.SECRET.encode(), role + mine + theirs + extra, "sha256")

    with call(tmp_path, 0, "tcp") as caller:
        caller.sendall(mine)
        theirs = caller.recv(224, socket.MSG_WAITALL)
        mine_proof = bytearray(card + proof(b"dialler", theirs, card))
        mine_proof[-1] ^= wrong_bit
        caller.sendall(mine_proof)
        verdict = caller.recv(36 + len(CARD), socket.MSG_WAITALL)
        if wrong_bit:
            assert verdict == UNPROVEN
            exchange(communicators)
        else:
            welcome = (1).to_bytes(4, "little")
            said = verdict[: 4 + len(CARD)]
            assert said.startswith(welcome)
            assert verdict == said + proof(b"acceptor", theirs, said)
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


def allow_descriptors(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))


class Strangers:
    """Callers who never hang up; from raised() on they go on talking, byte by byte."""

    def __init__(self, folder: Path, transport: str) -> None:
        self.folder, self.transport = folder, transport
        self.sockets: list[socket.socket] = []
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.drip)
        allow_descriptors(4096)

    def __enter__(self) -> Strangers:
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        if self.thread.is_alive():
            self.thread.join()
        for stranger in self.sockets:
            stranger.close()

    def call(self, rank: int, count: int, words: Sequence[Callable[[], bytes]] = WORDS) -> None:
        local, address = contact(self.folder, rank)
        tcp = self.transport == "tcp"
        for i in range(count):
            stranger = socket.socket(socket.AF_INET if tcp else socket.AF_UNIX)
            self.sockets.append(stranger)
            stranger.setblocking(False)
            stranger.connect_ex(address if tcp else "\0" + local)
            with contextlib.suppress(OSError):
                stranger.send(words[i % len(words)]())

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


def test_a_rank_gets_through_to_one_whose_places_greeted_strangers_keep(tmp_path):
    with (
        Strangers(tmp_path, "tcp") as strangers,
        jobs.connect(tmp_path, 0, 2, transport="tcp") as acceptor,
        jobs.connect(tmp_path, 1, 2, transport="tcp") as caller,
    ):
        strangers.call(0, 400, [lambda: HELLO])
        request = caller.isend(b"hello", 0)
        assert acceptor.recv(buffer := bytearray(5), dicomm.ANY_SOURCE) == 5
        assert request.wait() == 5 and buffer == b"hello"


CROWD = 400


def gather(rank, folder, transport):
    with jobs.connect(folder, 0, CROWD + 1, transport=transport) as communicator:
        buffer, ranks = bytearray(4), []
        for _ in range(CROWD):
            communicator.recv(buffer, dicomm.ANY_SOURCE)
            ranks.append(int.from_bytes(buffer, "little"))
        return sorted(ranks)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_hundreds_of_ranks_get_through_to_one_that_was_held_up(tmp_path, transport):
    allow_descriptors(8192)
    with jobs.Job(1, gather, tmp_path, transport) as job:
        ranks = range(1, CROWD + 1)
        crowd = [jobs.connect(tmp_path, rank, CROWD + 1, transport=transport) for rank in ranks]
        contact(tmp_path, 0)  # it listens
        pid = job.processes[0].pid
        os.kill(pid, signal.SIGSTOP)
        requests = [
            communicator.isend(rank.to_bytes(4, "little"), 0)
            for rank, communicator in zip(ranks, crowd, strict=True)
        ]
        time.sleep(0.5)  # their calls are in the queue
        os.kill(pid, signal.SIGCONT)
        for request in requests:
            assert request.wait(timeout_s=20) == 4
        assert job.result(0) == list(ranks)
        for communicator in crowd:
            communicator.close()


@contextlib.contextmanager
def no_descriptors_left():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    yield
    for fd in taken:
        os.close(fd)


def acceptor_without_descriptors(rank, folder, transport):
    with jobs.connect(folder, 0, 2, transport=transport) as communicator:
        with no_descriptors_left(), contextlib.suppress(dicomm.TimeoutError):
            Path(folder, "taken").mkdir()
            before_s = time.process_time()
            communicator.recv(bytearray(5), dicomm.ANY_SOURCE, tag=9, timeout_s=2)
        computed_s = time.process_time() - before_s
        communicator.recv(bytearray(5), dicomm.ANY_SOURCE)
        return computed_s


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_an_acceptor_without_descriptors_is_named_and_does_not_spin(tmp_path, transport):
    with (
        jobs.Job(1, acceptor_without_descriptors, tmp_path, transport) as job,
        jobs.connect(tmp_path, 1, 2, transport=transport) as caller,
    ):
        jobs.wait_for_file(tmp_path / "taken")
        request = caller.isend(b"hello", 0)
        with pytest.raises(dicomm.TimeoutError) as raised:
            request.wait(timeout_s=1)
        pid = job.processes[0].pid
        assert f"rank 0, pid {pid} on host" in str(raised.value)
        assert "has no file descriptors left (ulimit -n)" in str(raised.value)
        assert request.wait() == 5
        assert job.result(0) < 0.3  # processor time of 2 s; trying without a pause took 0.7 s


class KnownStore:
    """What is known already needs no descriptor to be read."""

    def __init__(self, folder):
        self.store = dicomm.FileStore(folder)
        self.known = {"dicomm/default/0": self.store.get("dicomm/default/0", 10)}

    def set(self, key, value):
        self.store.set(key, value)

    def get(self, key, timeout_s):
        return self.known[key]


def dialler_without_descriptors(rank, folder, transport):
    store = KnownStore(folder)
    with dicomm.Communicator(1, 2, store, secret=jobs.SECRET, transport=transport) as communicator:
        with no_descriptors_left(), pytest.raises(dicomm.TimeoutError) as raised:
            communicator.send(b"hello", 0, timeout_s=0.5)
        communicator.send(b"again", 0)
        return str(raised.value)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_dialler_without_descriptors_says_so_and_tries_again(tmp_path, transport):
    with (
        jobs.connect(tmp_path, 0, 2, transport=transport) as acceptor,
        jobs.Job(1, dialler_without_descriptors, tmp_path, transport) as job,
    ):
        assert acceptor.recv(buffer := bytearray(5), dicomm.ANY_SOURCE) == 5 and buffer == b"again"
        words = job.result(0)
        assert "this rank has no file descriptors left (ulimit -n)" in words
        assert "rank 0 is not connected yet (it listens at " in words


def test_a_rank_with_another_secret_is_an_error_on_both_sides_and_no_payload_passes(tmp_path):
    right = jobs.connect(tmp_path, 0, 2)
    wrong = jobs.connect(tmp_path, 1, 2, secret="another")
    buffer = bytearray(3)
    receive = right.irecv(buffer, 1)
    with pytest.raises(dicomm.PeerError, match="secrets differ"):
        wrong.send(b"abc", 0)
    with pytest.raises(dicomm.PeerError, match="secrets differ"):
        receive.wait(timeout_s=30)
    assert buffer == bytes(3)
    wrong.close()
    right.close()


def test_nobody_calls_the_address_that_a_stranger_wrote_to_the_store(tmp_path, capfd):
    store, own = dicomm.FileStore(tmp_path), tmp_path / "stranger"
    own.mkdir()
    first = jobs.connect(tmp_path, 0, 2, transport="tcp")
    with jobs.connect(own, 1, 2, transport="tcp", secret="another"):  # where the stranger listens
        forged = dicomm.FileStore(own).get("dicomm/default/1", 10)
        store.set("dicomm/default/1", forged)
        sent = first.isend(b"hello", 1)
        with pytest.raises(dicomm.TimeoutError):
            sent.wait(timeout_s=1)
        store.set("dicomm/default/1", store.get("dicomm/default/0", 10))  # a seal of another key
        with pytest.raises(dicomm.TimeoutError):
            sent.wait(timeout_s=1)
        second = jobs.connect(tmp_path, 1, 2, transport="tcp")
        second.recv(buffer := bytearray(5), 0)
        assert buffer == b"hello"
    told = "somebody without the job's secret wrote 'dicomm/default/1' to the store"
    assert capfd.readouterr().err.count(told) == 1
    for communicator in (first, second):
        communicator.close()


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
        pytest.raises(dicomm.PeerError, match="wrote 'dicomm/default/1' to the store"),
    ):
        communicator.send(b"x", 1)
