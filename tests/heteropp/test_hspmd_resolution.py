"""Any annotation to any other: exact target shards, no byte twice, as many bytes as planned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hspmd_pairs import RANKS, elements, random_pair
from hspmd_ranks import Counted, Ranks

from heteropp.layout.hspmd.annotation import DUPLICATE, PARTIAL, Annotation, holdings
from heteropp.layout.hspmd.exchange import communicate
from heteropp.layout.hspmd.resolution import Communication, ResolutionError, resolve

PAIRS = 6000  # of which more than 5,000 are supported
ITEMSIZE = 8


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(RANKS)
    yield ranks
    ranks.close()


def resolved(seed: int) -> tuple[tuple[int, ...], Communication] | None:
    shape, source, target = random_pair(seed)
    try:
        return shape, resolve(source, target, shape, ITEMSIZE)
    except ResolutionError:
        return None


def part_of(truth: np.ndarray, annotation: Annotation, rank: int, seed: int) -> np.ndarray | None:
    """What a rank holds: integers, so that every order of summing gives the same."""
    held = elements(annotation, truth.shape)
    if rank not in held:
        return None
    numbers, summand = held[rank]
    if summand is None:
        return truth.ravel()[numbers]
    everyone = sorted({s for _, s in held.values() if s is not None})
    if annotation.hdim != PARTIAL:
        everyone = [s for s in everyone if s[0] == summand[0]]
    whole = truth.copy()
    for other in everyone[1:]:
        values = np.random.default_rng([seed, hash(other) % 1000]).integers(-9, 9, truth.shape)
        if other == summand:
            return values.astype(truth.dtype).ravel()[numbers]
        whole -= values
    return whole.ravel()[numbers]


def truth_of(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-99, 99, shape).astype(np.float64)


def run_pairs(rank: int, seeds: range) -> list[tuple[np.ndarray | None, Counter[int]]]:
    """Returns what a rank has in the end and the bytes it sent to each rank, for each seed's pair.

    Pairs of annotations that the resolver does not support are left out.
    """
    results = []
    for seed in seeds:
        if (found := resolved(seed)) is None:
            continue
        shape, communication = found
        part = part_of(truth_of(shape, seed), communication.source, rank, seed)
        local = None if part is None else torch.tensor(part)
        with Counted() as counted:
            done = communicate(communication, rank, local, torch.float64, torch.device("cpu"))
        results.append((None if done is None else done.numpy().copy(), counted.sent_bytes))
    return results


def check_values(truth: np.ndarray, target: Annotation, parts: list[Any]) -> None:
    """Every rank has its elements; all duplicates agree, and summands sum to the truth."""
    held = elements(target, truth.shape)
    assert {rank for rank, part in enumerate(parts) if part is not None} == set(held)
    sums: dict[object, np.ndarray] = {}
    seen: dict[object, np.ndarray] = {}
    for rank, (numbers, summand) in held.items():
        assert parts[rank].shape == numbers.shape
        if summand is None:
            assert np.array_equal(parts[rank], truth.ravel()[numbers])
            continue
        values = seen.setdefault(summand, np.full(truth.size, np.nan))
        known = values[numbers]
        assert np.all(np.isnan(known) | (known == parts[rank])), "duplicates of a summand differ"
        values[numbers] = parts[rank]
    for summand, values in seen.items():
        total = "all" if target.hdim == PARTIAL else summand[0]
        sums[total] = sums.get(total, 0) + values
    for total in sums.values():
        known = ~np.isnan(total)
        assert known.any() or not truth.size
        assert np.array_equal(total[known], truth.ravel()[known])


def missing_bytes(communication: Communication, shape: tuple[int, ...]) -> int:
    """What ranks want of whole values and do not hold: that much must come, and no more."""
    before = elements(communication.source, shape)
    nothing = np.array([], dtype=int)
    return ITEMSIZE * sum(
        np.setdiff1d(numbers, before.get(rank, (nothing, None))[0]).size
        for rank, (numbers, _) in elements(communication.target, shape).items()
    )


def check_news(communication: Communication, shape: tuple[int, ...]) -> None:
    """No rank is sent what it holds: element by element, round after round."""
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    for step in communication.steps:
        has: dict[int, dict[object, set[int]]] = {rank: {} for rank in range(RANKS)}
        for holding in step.source:
            box = numbers[tuple(slice(a, b) for a, b in holding.box.ranges)]
            has[holding.rank][holding.summand] = set(box.ravel().tolist())
        for number, round_ in enumerate(step.rounds):
            new: list[tuple[int, set[int]]] = []
            for transfer in round_:
                box = numbers[tuple(slice(a, b) for a, b in transfer.box.ranges)]
                sent = set(box.ravel().tolist())
                for sender in transfer.senders:
                    kinds = ["sum"] if number else [k for k in has[sender] if k != "sum"]
                    (kind,) = (k for k in kinds if sent <= has[sender].get(k, set()))
                    if sender != transfer.receiver:
                        assert not sent & has[transfer.receiver].get(kind, set())
                new.append((transfer.receiver, sent))
            for receiver, sent in new:
                known = has[receiver].setdefault("sum", set())
                assert not sent & known, "a rank is sent the same twice"
                known |= sent


def check_pairs(ranks: Ranks, seeds: range) -> Counter[str]:
    """Runs random pairs on real ranks. Counts the kinds, and "pairs" that are supported."""
    answers = ranks.run(run_pairs, seeds)
    seen: Counter[str] = Counter()
    supported = [(seed, found) for seed in seeds if (found := resolved(seed)) is not None]
    for turn, (seed, (shape, communication)) in enumerate(supported):
        parts = [answer[turn][0] for answer in answers]
        check_values(truth_of(shape, seed), communication.target, parts)
        counted = {
            (rank, peer): size_bytes
            for rank, answer in enumerate(answers)
            for peer, size_bytes in answer[turn][1].items()
        }
        assert counted == communication.volume_bytes, communication
        check_news(communication, shape)
        if not communication.source.partial:
            assert sum(counted.values()) == missing_bytes(communication, shape)
        seen.update(["pairs", *(kind for step in communication.kinds for kind in step)])
    return seen


@pytest.mark.parametrize("pairs", [PAIRS // 10, pytest.param(PAIRS, marks=pytest.mark.exhaustive)])
def test_thousands_of_random_pairs_on_real_ranks(ranks: Ranks, pairs: int) -> None:
    seen = check_pairs(ranks, range(pairs))
    assert seen["pairs"] >= 5000 * pairs // PAIRS
    assert len(seen) == 10 and min(seen.values()) >= 50 * pairs // PAIRS, seen


def test_dicomm_carries_as_many_bytes_as_planned() -> None:
    ranks = Ranks(RANKS, "dicomm")
    try:
        assert check_pairs(ranks, range(PAIRS, PAIRS + 300))["pairs"] >= 250
    finally:
        ranks.close()


def test_what_a_rank_holds_is_what_annotations_say() -> None:
    for seed in range(1000):
        shape, annotation, _ = random_pair(seed)
        numbers = np.arange(int(np.prod(shape))).reshape(shape)
        held = holdings(annotation, shape)
        expected = elements(annotation, shape)
        assert {holding.rank for holding in held} == set(expected)
        for holding in held:
            box = numbers[tuple(slice(a, b) for a, b in holding.box.ranges)]
            assert np.array_equal(box, expected[holding.rank][0])
            for other in held:
                alike = expected[holding.rank][1] == expected[other.rank][1]
                assert (holding.summand == other.summand) == alike


def kinds(source: Annotation, target: Annotation, shape: tuple[int, ...] = (12, 12)) -> list[Any]:
    return resolve(source, target, shape, ITEMSIZE).kinds


def group(axes: dict[int, int], ranks: list[int] | None = None) -> Annotation:
    return Annotation.of([([0, 1, 2, 3] if ranks is None else ranks, axes)])


def test_bottom_tier_is_classified_as_in_figures_4_and_5() -> None:
    assert kinds(group({0: 4}), group({0: 4})) == [["identity"]]
    assert kinds(group({0: 4}), group({0: 4}, [4, 5, 6, 7])) == [["send/recv"]]
    assert kinds(group({PARTIAL: 4}), group({DUPLICATE: 4})) == [["all-reduce"]]
    assert kinds(group({PARTIAL: 4}), group({1: 4})) == [["reduce-scatter"]]
    assert kinds(group({0: 2, PARTIAL: 2}), group({0: 4})) == [["reduce-scatter"]]
    assert kinds(group({0: 4}), group({DUPLICATE: 4})) == [["all-gather"]]
    assert kinds(group({0: 4}), group({1: 4})) == [["batched send/recv"]]
    assert kinds(group({0: 4}), group({0: 2}, [4, 5])) == [["batched send/recv"]]


def test_top_tier_is_classified_as_in_figures_6_and_7() -> None:
    def union(hdim: int, first: dict[int, int], second: dict[int, int]) -> Annotation:
        return Annotation.of([([0, 1], first), ([2, 3], second)], hdim)

    unlike = {1: 2}, {DUPLICATE: 2}
    assert kinds(union(PARTIAL, *unlike), union(DUPLICATE, *unlike)) == [["split-all-reduce"]]
    assert kinds(union(PARTIAL, *unlike), union(0, *unlike)) == [["split-reduce-scatter"]]
    assert kinds(union(0, *unlike), union(DUPLICATE, *unlike)) == [["split-all-gather"]]
    assert kinds(union(0, *unlike), union(1, *unlike)) == [["batched send/recv"]]
    before, after = union(PARTIAL, {PARTIAL: 2}, {1: 2}), union(DUPLICATE, {1: 2}, {1: 2})
    assert kinds(before, after) == [["reduce-scatter", "identity"], ["split-all-reduce"]]


def test_one_group_is_read_as_a_union_where_that_helps() -> None:
    union = Annotation.of([([0, 1], {1: 2}), ([2, 3], {1: 2})])
    assert kinds(group({PARTIAL: 2, 1: 2}), union) == [["split-all-reduce"]]


def test_collectives_send_what_their_direct_algorithm_sends() -> None:
    shape, whole = (8, 4), 8 * 4 * ITEMSIZE

    def sent(source: Annotation, target: Annotation) -> dict[tuple[int, int], int]:
        return resolve(source, target, shape, ITEMSIZE).volume_bytes

    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    assert sent(group({0: 4}), group({DUPLICATE: 4})) == dict.fromkeys(pairs, whole // 4)
    assert sent(group({PARTIAL: 4}), group({0: 4})) == dict.fromkeys(pairs, whole // 4)
    assert sent(group({PARTIAL: 4}), group({DUPLICATE: 4})) == dict.fromkeys(pairs, whole // 2)
    assert sent(group({DUPLICATE: 4}), group({0: 4})) == {}


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        (group({PARTIAL: 4}), group({DUPLICATE: 2}, [4, 5]), "unlike ranks"),
        (group({DUPLICATE: 4}), group({PARTIAL: 4}), "nothing makes such summands"),
        (group({PARTIAL: 2, 0: 2}), group({1: 4}), "no summand of"),
        (
            group({PARTIAL: 4}),
            Annotation.of([([0], {}), ([1, 2, 3], {0: 3})]),
            "a batched send/recv between unlike subgroups sums nothing",
        ),
        (
            Annotation.of([([0], {}), ([1], {})], 0),
            Annotation.of([([0], {}), ([1], {})], PARTIAL),
            "only whole values come of it",
        ),
    ],
)
def test_unsupported_pairs_are_refused_with_the_reason(
    source: Annotation, target: Annotation, reason: str
) -> None:
    with pytest.raises(ResolutionError) as error:
        resolve(source, target, (12, 12), ITEMSIZE)
    assert reason in str(error.value)
    assert str(source) in str(error.value) and str(target) in str(error.value)


def test_every_refused_pair_is_partial() -> None:
    """Whole values go from anywhere to anywhere."""
    refused = 0
    for seed in range(2000):
        shape, source, target = random_pair(seed)
        try:
            resolve(source, target, shape, ITEMSIZE)
        except ResolutionError:
            refused += 1
            assert source.partial or target.partial
    assert refused > 100
