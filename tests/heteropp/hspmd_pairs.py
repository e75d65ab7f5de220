"""Random annotations, and what ranks hold under them, found by brute force over all elements."""

from __future__ import annotations

from random import Random

import numpy as np

from heteropp.layout.hspmd.annotation import (
    DUPLICATE,
    PARTIAL,
    Annotation,
    AnnotationError,
    holdings,
)

RANKS = 6
SIZES = (1, 4, 6, 12, 12, 24)


def random_shape(random: Random) -> tuple[int, ...]:
    return tuple(random.choice(SIZES) for _ in range(random.choice((0, 1, 2, 2, 2, 3))))


def random_states(random: Random, size: int, roles: list[int]) -> list[tuple[int, int]]:
    axes = []
    while size > 1:
        parts = random.choice([n for n in range(2, size + 1) if size % n == 0])
        axes.append((random.choice(roles), parts))
        size //= parts
    return axes


def random_groups(random: Random) -> list[list[int]]:
    ranks = random.sample(range(RANKS), random.randint(1, RANKS))
    cuts = sorted(random.sample(range(1, len(ranks)), random.randint(0, min(2, len(ranks) - 1))))
    return [ranks[a:b] for a, b in zip([0, *cuts], [*cuts, len(ranks)], strict=True)]


def fits(annotation: Annotation, shape: tuple[int, ...]) -> bool:
    try:
        holdings(annotation, shape)
    except AnnotationError:
        return False
    return True


def random_annotation(
    random: Random, shape: tuple[int, ...], like: Annotation | None = None
) -> Annotation:
    """Returns one that fits the shape; some of its groups, states and hdim are those of `like`."""
    while True:
        groups = random_groups(random)
        roles = [DUPLICATE, *range(len(shape)), *range(len(shape))]
        if random.random() < (0.7 if like is None else 0.15):
            roles.append(PARTIAL)
        hdim = random.choice(roles)
        shares = [random.randint(1, 3) for _ in groups]
        if like is not None and random.random() < 0.85:
            groups = [list(group) for group in like.groups]
            shares = list(like.shares) or [random.randint(1, 3) for _ in groups]
            if random.random() < 0.2:
                i = random.randrange(len(groups))
                random.shuffle(groups[i])
            if random.random() < 0.5:
                hdim = like.hdim
        states = [random_states(random, len(group), roles) for group in groups]
        if like is not None and [len(g) for g in groups] == [len(g) for g in like.groups]:
            states = [
                list(old.axes) if random.random() < 0.4 else new
                for old, new in zip(like.states, states, strict=True)
            ]
        annotation = Annotation.of(zip(groups, states, strict=True), hdim, shares)
        if fits(annotation, shape):
            return annotation


def random_pair(seed: int) -> tuple[tuple[int, ...], Annotation, Annotation]:
    random = Random(seed)
    shape = random_shape(random)
    source = random_annotation(random, shape)
    target = random_annotation(random, shape, source)
    while target == source and random.random() < 0.95:
        target = random_annotation(random, shape, source)
    return shape, source, target


def elements(
    annotation: Annotation, shape: tuple[int, ...]
) -> dict[int, tuple[np.ndarray, object]]:
    """Returns for each rank the numbers of the elements that it holds, and its summand.

    The summand is None for whole values. Nothing is computed with boxes, so that the result can
    check the code that does.
    """
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    result = {}
    for i, (ranks, states) in enumerate(zip(annotation.groups, annotation.states, strict=True)):
        part = numbers
        if annotation.hdim >= 0:
            edges = np.cumsum([0, *annotation.shares]) * shape[annotation.hdim]
            first, last = edges[i : i + 2] // sum(annotation.shares)
            part = numbers.take(range(first, last), annotation.hdim)
        shards: list[tuple[np.ndarray, tuple[int, ...]]] = [(part, ())]
        for dimension, parts in states.axes:
            shards = [
                (
                    np.split(held, parts, dimension)[turn] if dimension >= 0 else held,
                    (*summand, turn) if dimension == PARTIAL else summand,
                )
                for held, summand in shards
                for turn in range(parts)
            ]
        for rank, (held, summand) in zip(ranks, shards, strict=True):
            partial = annotation.hdim == PARTIAL or summand
            result[rank] = held, ((i, summand) if partial else None)
    return result
