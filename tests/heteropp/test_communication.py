"""Seconds of collectives, against messages counted by hand."""

from __future__ import annotations

import pytest

from heteropp.cost.communication import all_gather_s, all_reduce_s, broadcast_s
from heteropp.description.cluster import Link

LINK = Link(latency_s=1e-3, bytes_per_s=1e6)


def test_many_ranks_pass_pieces_around_a_ring() -> None:
    """16 ranks: 15 rounds of a 16th each; a reduction goes round twice."""
    piece_s = LINK.seconds(1e6 / 16)
    assert all_gather_s(1e6, 16, LINK) == pytest.approx(15 * piece_s)
    assert all_reduce_s(1e6, 16, LINK) == pytest.approx(30 * piece_s)


def test_short_messages_among_many_double() -> None:
    assert all_reduce_s(1000, 16, LINK) == pytest.approx(4 * LINK.seconds(1000))
    # halves of 100,000 bytes, and back: 50,000 ... 6,250, twice
    halves = [100_000 / 2**i for i in (1, 2, 3, 4)]
    expected = 2 * sum(LINK.seconds(size) for size in halves)
    assert all_reduce_s(100_000, 16, LINK) == pytest.approx(expected)
    # 16 pieces of 1,000: 1,000 ... 8,000
    expected = sum(LINK.seconds(size) for size in (1000, 2000, 4000, 8000))
    assert all_gather_s(16_000, 16, LINK) == pytest.approx(expected)


def test_broadcast() -> None:
    assert broadcast_s(1e6, 1, LINK) == 0
    assert broadcast_s(1e6, 2, LINK) == pytest.approx(LINK.seconds(1e6))
    assert broadcast_s(1000, 8, LINK) == pytest.approx(3 * LINK.seconds(1000))
    assert broadcast_s(1e6, 8, LINK) == pytest.approx(2 * LINK.seconds(7e6 / 8))
