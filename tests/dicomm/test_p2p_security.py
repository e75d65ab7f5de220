"""What somebody on the way between two ranks can read and change, by what DICOMM_SECURITY says."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jobs
import pytest
from installed import own_mounts
from relay import CHANGED, PAID, Relay, sent

import dicomm


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[list[dicomm.Communicator], list[Relay]]]:
    ranks = [jobs.connect(tmp_path, rank, 2, transport="tcp") for rank in range(2)]
    yield ranks, [Relay(tmp_path, rank) for rank in range(2)]
    for rank in ranks:
        rank.abort("the test is over")


@pytest.fixture(params=["none", "integrity", "encryption"])
def security(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DICOMM_SECURITY", request.param)
    return request.param


def test_a_change_on_the_way_ends_the_connection_unless_nothing_was_asked_for(security, pair):
    ranks, relays = pair
    if security == "none":
        assert sent(ranks, PAID) == CHANGED
        return
    if security == "encryption":  # what cannot be read cannot be found, either
        assert sent(ranks, PAID) == PAID
        assert not any(PAID in relay.seen for relay in relays)
        return
    with pytest.raises(dicomm.PeerError, match="somebody on the way changed it"):
        sent(ranks, PAID)
    assert any(PAID in relay.seen for relay in relays)


@pytest.mark.parametrize("length", [1, 65_535, 65_537, 1 << 20, (1 << 20) + 1, 5_000_001])
def test_messages_of_every_length_arrive(security, pair, length):
    ranks, _ = pair
    message = os.urandom(length)
    with ThreadPoolExecutor(1) as other:
        back = other.submit(sent, ranks, message, sender=1)
        assert sent(ranks, message) == message
        assert back.result() == message


def test_a_link_says_what_protects_it(security, pair):
    ranks, _ = pair
    assert sent(ranks, b"a message")
    words = {rank.describe_link(1 - number)["protection"] for number, rank in enumerate(ranks)}
    assert len(words) == 1
    said = words.pop()
    assert said == "" if security == "none" else said.startswith(f"{security} by ")


# What OpenSSL reads in place of the processor's own word: no instructions for AES and its products.
WITHOUT_AES = {
    "x86_64": {"OPENSSL_ia32cap": "~0x200000200000000:0"},
    "aarch64": {"OPENSSL_armcap": "0x1"},
}

PROTECTED = """
import sys
import dicomm
rank = int(sys.argv[2])
MESSAGE = bytes(range(256)) * 4000

def swap(own):
    sent = own.isend(MESSAGE, 1 - rank)
    own.recv(got := bytearray(len(MESSAGE)), 1 - rank)
    sent.wait()
    assert got == MESSAGE

store = dicomm.FileStore(sys.argv[1])
with dicomm.Communicator(rank, 2, store, secret="s", transport="tcp") as own:
    swap(own)
    print(own.describe_link(1 - rank)["protection"])
    swap(own)  # before it neither leaves
"""


@pytest.mark.parametrize("setting", ["integrity", "encryption"])
def test_where_one_processor_is_slow_with_aes_both_take_chacha20(tmp_path, setting):
    slow = WITHOUT_AES[platform.machine()]
    environment = os.environ | {"DICOMM_SECURITY": setting}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROTECTED, tmp_path, str(rank)],
            env=environment | (slow if rank == 1 else {}),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=jobs.DEADLINE_S)[0] for rank in ranks]
    assert said == [f"{setting} by ChaCha20-Poly1305\n"] * 2


def test_messages_that_are_given_up_on_their_way_disturb_no_other(security, pair):
    ranks, _ = pair
    message = os.urandom(100_000)
    for turn in range(30):
        given_up = [ranks[1].irecv(bytearray(5_000_000), 0, tag=1)]
        given_up.append(ranks[0].isend(bytes(5_000_000), 1, tag=1))
        time.sleep(turn * 2e-4)
        if turn % 2:
            given_up.reverse()
        del given_up[0]
        assert sent(ranks, message) == message
        del given_up[0]


def connected(folder: Path, settings: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The errors of two ranks, each with a setting of its own, that send to each other."""
    ranks = []
    for rank, setting in enumerate(settings):
        monkeypatch.setenv("DICOMM_SECURITY", setting)
        ranks.append(jobs.connect(folder, rank, 2, transport="tcp", timeout_s=3.0))
    said = []
    for number, rank in enumerate(ranks):
        with pytest.raises(dicomm.Error) as failed:
            rank.send(bytes(8), 1 - number)
            rank.recv(bytearray(8), 1 - number)
        said.append(str(failed.value))
    return said


@pytest.mark.parametrize("settings", [["none", "integrity"], ["encryption", "integrity"]])
def test_unlike_settings_are_told_with_both_values(tmp_path, settings, monkeypatch):
    for mine, theirs, said in zip(
        settings, settings[::-1], connected(tmp_path, settings, monkeypatch), strict=True
    ):
        assert f"DICOMM_SECURITY asks for {theirs} there and for {mine} here" in said
        assert "expected the same on every rank" in said


@pytest.mark.parametrize(
    ("variable", "word", "expected"),
    [
        ("DICOMM_SECURITY", "tls", "none, integrity or encryption"),
        ("DICOMM_KTLS", "1", "on or off"),
    ],
)
def test_another_word_is_refused(tmp_path, monkeypatch, variable, word, expected):
    monkeypatch.setenv(variable, word)
    with pytest.raises(dicomm.Error, match=f"{variable} is '{word}', expected {expected}"):
        jobs.connect(tmp_path, 0, 2, transport="tcp")


MEET = """
import sys
import dicomm
store = dicomm.FileStore(sys.argv[1])
ranks = [dicomm.Communicator(r, 2, store, secret="s", transport="tcp") for r in range(2)]
try:
    ranks[0].send(bytes(8), 1)
except dicomm.Error as error:
    print(error)
"""


def test_without_libcrypto_nothing_goes_out_unprotected(tmp_path):
    ctypes.CDLL("libcrypto.so.3")
    maps = Path("/proc/self/maps").read_text()
    library = next(line.split()[-1] for line in maps.splitlines() if "libcrypto.so.3" in line)
    hidden = f'mount --bind /dev/null {library}; exec "$@"'
    done = subprocess.run(
        [*own_mounts(), "sh", "-c", hidden, "sh", sys.executable, "-c", MEET, tmp_path],
        env=os.environ | {"DICOMM_SECURITY": "encryption"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "OpenSSL's libcrypto.so.3 is not here; install it, or set DICOMM_SECURITY" in done.stdout
