"""Batched send/recv: the three rules, loads balanced over many tensors, one message a pair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from hspmd_ranks import Counted, Ranks

from heteropp.layout.boxes import Box
from heteropp.layout.hspmd.exchange import TensorPiece, exchange
from heteropp.layout.hspmd.routing import HeldBox, RoutingError, Wanted, route, volume_bytes

WORLD = 4
DTYPES = (torch.float64, torch.bfloat16, torch.int32, torch.bool)


@pytest.fixture(scope="module", params=["gloo", "dicomm"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = Ranks(WORLD, request.param)
    yield ranks
    ranks.close()


def rows(first: int, last: int) -> Box:
    return Box(((first, last), (0, 8)))


def test_what_a_rank_holds_it_copies() -> None:
    (only,) = route([HeldBox(0, r, rows(0, 4)) for r in range(3)], [Wanted(0, 1, rows(0, 4))], [4])
    assert [t.senders for t in only] == [(1,)]
    assert volume_bytes([only]) == {}


@pytest.mark.parametrize("divide", [False, True])
def test_where_nothing_is_wanted_nothing_moves(divide: bool) -> None:
    assert route([HeldBox(0, 0, rows(0, 4))], [], [4], divide=divide) == []


def test_the_fastest_link_is_chosen() -> None:
    """Figure 8: ranks 1 and 9 hold a slice, and 9 is nearer to 8."""

    def bytes_per_s(source: int, destination: int) -> float:
        return 400e9 if source // 8 == destination // 8 else 25e9

    held = [HeldBox(0, 1, rows(0, 4)), HeldBox(0, 9, rows(0, 4))]
    (only,) = route(held, [Wanted(0, 8, rows(0, 4))], [4], bytes_per_s)
    assert [t.senders for t in only] == [(9,)]


@pytest.mark.parametrize("seed", range(100))
def test_among_random_links_no_faster_one_is_left_out(seed: int) -> None:
    random = Random(seed)
    speeds = {(a, b): random.choice((1, 5, 25)) for a in range(WORLD) for b in range(WORLD)}
    tensors, held, wanted = random_move(seed)
    rounds = route(held, wanted, [t.itemsize for t in tensors], lambda a, b: speeds[a, b])
    for transfer in rounds[0]:
        holders = [
            h.rank
            for h in held
            if h.tensor == transfer.tensor and transfer.box.intersect(h.box) == transfer.box
        ]
        (sender,) = transfer.senders
        if transfer.receiver in holders:
            assert sender == transfer.receiver
        else:
            fastest = max(speeds[holder, transfer.receiver] for holder in holders)
            assert speeds[sender, transfer.receiver] == fastest


def test_the_least_loaded_sends_among_equals() -> None:
    held = [HeldBox(0, rank, rows(0, 8)) for rank in range(4)]
    (only,) = route(held, [Wanted(0, 4 + i, rows(2 * i, 2 * i + 2)) for i in range(4)], [4])
    assert sorted(t.senders for t in only) == [(0,), (1,), (2,), (3,)]


def test_loads_are_balanced_over_tensors() -> None:
    """Rank 0 alone holds some tensors, so others send what all hold."""
    sizes = [Random(1).randint(1, 30) for _ in range(60)]
    held, wanted = [], []
    for tensor, size in enumerate(sizes):
        holders = [0] if tensor % 4 == 0 else [0, 1, 2]
        held += [HeldBox(tensor, rank, rows(0, size)) for rank in holders]
        wanted += [Wanted(tensor, rank, rows(0, size)) for rank in (3, 4)]
    sent: Counter[int] = Counter()
    for (source, _), size_bytes in volume_bytes(route(held, wanted, [1] * 60)).items():
        sent[source] += size_bytes
    total = 2 * 8 * sum(sizes)
    assert sum(sent.values()) == total
    assert max(sent.values()) <= 1.02 * total / 3


def test_what_no_rank_holds_is_named() -> None:
    with pytest.raises(RoutingError, match=r"rank 3 wants \[\(4, 6\), \(0, 8\)\] of tensor 0"):
        route([HeldBox(0, 0, rows(0, 4))], [Wanted(0, 3, rows(2, 6))], [4])


def random_cut(random: Random, shape: tuple[int, int]) -> list[tuple[int, Box]]:
    """Disjoint boxes that make up a tensor: bands of rows, each cut by columns, some held twice."""
    result = []
    edges = sorted({0, shape[0], *(random.randint(0, shape[0]) for _ in range(3))})
    for first, last in pairwise(edges):
        column = random.randint(0, shape[1])
        for left, right in ((0, column), (column, shape[1])):
            if left < right:
                box = Box(((first, last), (left, right)))
                holders = random.sample(range(WORLD), random.randint(1, 2))
                result += [(rank, box) for rank in holders]
    return result


def random_move(seed: int) -> tuple[list[torch.Tensor], list[HeldBox], list[Wanted]]:
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    tensors, held, wanted = [], [], []
    for tensor in range(5):
        shape = random.randint(1, 9), random.randint(1, 9)
        values = torch.randint(-50, 50, shape, generator=generator).to(random.choice(DTYPES))
        tensors.append(values)
        held += [HeldBox(tensor, rank, box) for rank, box in random_cut(random, shape)]
        wanted += [Wanted(tensor, rank, box) for rank, box in random_cut(random, shape)]
    return tensors, held, wanted


def move(rank: int, seeds: range) -> list[tuple[dict[int, int], int]]:
    """Moves tensors of several dtypes at once, and checks every box; what it sent, and in how many
    messages."""
    results: list[Any] = []
    for seed in seeds:
        tensors, held, wanted = random_move(seed)
        rounds = route(held, wanted, [t.itemsize for t in tensors])
        whole = [Box(tuple((0, size) for size in t.shape)) for t in tensors]
        ours = [
            TensorPiece(h.tensor, h.box, tensors[h.tensor][h.box.within(whole[h.tensor])])
            for h in held
            if h.rank == rank
        ]
        theirs = [
            TensorPiece(w.tensor, w.box, torch.zeros(w.box.shape, dtype=tensors[w.tensor].dtype))
            for w in wanted
            if w.rank == rank
        ]
        with Counted() as counted:
            exchange(rounds, rank, ours, theirs)
        for piece in theirs:
            expected = tensors[piece.tensor][piece.box.within(whole[piece.tensor])]
            assert torch.equal(piece.values, expected), f"seed {seed}"
        results.append((counted.sent_bytes, counted.messages))
    return results


def test_many_tensors_move_at_once(ranks: Ranks) -> None:
    seeds = range(150)
    answers = ranks.run(move, seeds)
    for seed in seeds:
        tensors, held, wanted = random_move(seed)
        planned = volume_bytes(route(held, wanted, [t.itemsize for t in tensors]))
        counted = {
            (rank, peer): size_bytes
            for rank, answer in enumerate(answers)
            for peer, size_bytes in answer[seed][0].items()
        }
        assert counted == planned
        assert sum(answer[seed][1] for answer in answers) == len(planned)
