"""Encryption by the kernel: here, as the guest's kernel can do it and most hosts' cannot."""

import os
import time

import jobs
import pytest
from relay import PAID, Relay, sent

import dicomm

IN_KERNEL = "encryption by AES-128-GCM in the kernel"
BY_OPENSSL = "encryption by AES-128-GCM"


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("DICOMM_SECURITY", "encryption")
    both = [jobs.connect(tmp_path, rank, 2, transport="tcp") for rank in range(2)]
    yield both
    for rank in both:
        rank.abort("the test is over")


@pytest.mark.parametrize("length", [1, 16_383, 16_385, 1 << 20, 5_000_001])
def test_messages_arrive_and_nobody_on_the_way_reads_them(tmp_path, ranks, length):
    relays = [Relay(tmp_path, rank) for rank in range(2)]
    message = PAID + os.urandom(length)
    for sender in (0, 1):
        assert sent(ranks, message, sender) == message
        assert ranks[sender].describe_link(1 - sender)["protection"] == IN_KERNEL
    seen = b"".join(relay.seen for relay in relays)
    assert len(seen) > 2 * length and PAID not in seen


HEADER = b"\x17\x03\x03"  # of a record of TLS, then its length in two bytes


def flip_a_bit(words):
    return words[:-1] + bytes([words[-1] ^ 1])


def lengthen_a_record(words):
    header = words.index(HEADER)
    return words[: header + 3] + b"\xff\xff" + words[header + 5 :]


def change_a_version(words):
    return words.replace(HEADER, b"\x17\x09\x09")


@pytest.mark.parametrize("change", [flip_a_bit, lengthen_a_record, change_a_version])
def test_what_changes_on_the_way_ends_the_connection(tmp_path, ranks, change):
    passed, is_changed = 0, False

    def change_once(words):
        """Changes what comes after 100,000 bytes, once, where it has the beginning of a record."""
        nonlocal passed, is_changed
        passed += len(words)
        is_due = passed > 100_000 and HEADER in words and not is_changed
        is_changed |= is_due
        return change(words) if is_due else words

    for rank in range(2):
        Relay(tmp_path, rank, change_once)
    arriving = ranks[1].irecv(bytearray(5_000_000), 0)
    leaving = ranks[0].isend(os.urandom(5_000_000), 1)
    with pytest.raises(dicomm.PeerError, match="somebody on the way changed it"):
        arriving.wait()
    with pytest.raises(dicomm.PeerError, match="rank 1"):
        leaving.wait()


def test_messages_that_are_given_up_on_their_way_disturb_no_other(ranks):
    message = os.urandom(100_000)
    for turn in range(10):
        given_up = [ranks[1].irecv(bytearray(3_000_000), 0, tag=1)]
        given_up.append(ranks[0].isend(bytes(3_000_000), 1, tag=1))
        time.sleep(turn * 1e-3)
        if turn % 2:
            given_up.reverse()
        del given_up[0]
        assert sent(ranks, message) == message
        del given_up[0]


def test_one_side_that_leaves_it_to_openssl_is_enough(tmp_path, monkeypatch):
    monkeypatch.setenv("DICOMM_SECURITY", "encryption")
    first = jobs.connect(tmp_path, 0, 2, transport="tcp")
    monkeypatch.setenv("DICOMM_KTLS", "off")
    ranks = [first, jobs.connect(tmp_path, 1, 2, transport="tcp")]
    assert sent(ranks, PAID) == PAID
    words = [rank.describe_link(1 - number)["protection"] for number, rank in enumerate(ranks)]
    assert words == [BY_OPENSSL] * 2
    for rank in ranks:
        rank.abort("the test is over")


def test_what_is_sent_at_once_arrives_whoever_is_ready_first(tmp_path, monkeypatch):
    monkeypatch.setenv("DICOMM_SECURITY", "encryption")
    for turn in range(50):
        (folder := tmp_path / str(turn)).mkdir()
        ranks = [jobs.connect(folder, rank, 2, transport="tcp") for rank in range(2)]
        assert sent(ranks, PAID, sender=turn % 2) == PAID
        assert ranks[0].describe_link(1)["protection"] == IN_KERNEL
        for rank in ranks:
            rank.abort("the turn is over")
