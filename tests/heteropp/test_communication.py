"""Seconds of collectives and resharding, against messages counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from clusters import cluster_of, tiny_model

from ditorch.chips import load_chip
from heteropp.cost.communication import all_gather_s, all_reduce_s, broadcast_s, resharding_s
from heteropp.description.cluster import Link
from heteropp.description.plan import Replica, Stage

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


def stage(*groups: tuple[int, ...], sequences: int) -> Stage:
    replicas = tuple(Replica(ranks=ranks, chip="x", batch_share=sequences) for ranks in groups)
    return Stage(layers=(0, 1), recompute=False, replicas=replicas)


def test_resharding_strategies() -> None:
    """The times of each strategy are those worked out by hand.

    One rank sends 4 sequences to two replicas on another node, which have two ranks each and take
    2 sequences each.
    """
    model, chip = tiny_model(), load_chip("a-mini")
    links = replace(
        chip.links,
        nics_per_node=4,
        nic_bytes_per_s=1e6,
        nic_latency_s=1e-3,
        intra_node_bytes_per_s=1e8,
        intra_node_latency_s=1e-5,
    )
    chip = replace(chip, links=links)
    cluster = cluster_of(("x", chip, 4), ("y", chip, 1))
    one, two = stage((4,), sequences=4), stage((0, 1), (2, 3), sequences=2)
    received = 2 * model.sequence_length * model.hidden * 4  # of each replica

    def seconds(strategy, sender, receiver):
        return resharding_s(model, sender, receiver, cluster, strategy)

    gathered_s = 1e-5 + received / 2 / 1e8
    assert seconds("all-gather", one, two) == pytest.approx(1e-3 + received / 2 / 1e6 + gathered_s)
    gathered_s = 1e-5 + received / 1e8
    assert seconds("broadcast", one, two) == pytest.approx(1e-3 + received / 1e6 + gathered_s)
    assert seconds("direct", one, two) == pytest.approx(1e-3 + received / 1e6)
    # and back: each replica's half arrives from one of its ranks
    assert seconds("all-gather", two, one) == pytest.approx(1e-3 + received / 1e6)
    for strategy in ("broadcast", "direct"):
        assert seconds(strategy, two, one) == pytest.approx(1e-3 + received / 1e6)
