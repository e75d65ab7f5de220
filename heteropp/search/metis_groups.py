"""Metis's inter-stage plans: orders of chip types, sizes of stages' groups, micro-batches."""

from __future__ import annotations

from collections.abc import Iterator

from heteropp.search.metis_cost import Arrangement
from heteropp.search.metis_problem import Problem


def arrangements(problem: Problem) -> Iterator[Arrangement]:
    """Yields all that Metis looks at, in its order: fewer stages and more micro-batches first."""
    for order in problem.orders:
        for stages in range(1, min(problem.chips, problem.profiles.layers) + 1):
            for groups in device_groups(problem, stages):
                for micro_batches in problem.micro_batch_counts:
                    yield Arrangement(order, groups, micro_batches)


def device_groups(problem: Problem, stages: int) -> Iterator[tuple[int, ...]]:
    """Yields sizes of the stages' groups: powers of two that add up to the chips, in every order.

    None of them is far below the mean.
    """
    least = problem.chips // stages * problem.variance
    sizes = [1 << bit for bit in range(problem.chips.bit_length()) if 1 << bit >= least]
    for ascending in _compositions(problem.chips, stages, sizes):
        for units in permutations(_merged(ascending, problem.permute_length)):
            yield tuple(size for unit in units for size in unit)


def _compositions(chips: int, stages: int, sizes: list[int]) -> Iterator[tuple[int, ...]]:
    """Ascending choices of `stages` sizes that add up to `chips`."""
    if not sizes or not sizes[0] * stages <= chips <= sizes[-1] * stages:
        return
    if stages == 0:
        yield ()
        return
    for index, size in enumerate(sizes):
        for others in _compositions(chips - size, stages - 1, sizes[index:]):
            yield (size, *others)


def _merged(groups: tuple[int, ...], length: int) -> list[tuple[int, ...]]:
    """Joins groups that stay neighbours, smallest first, until at most `length` are permuted."""
    units: list[tuple[int, ...]] = [(size,) for size in groups]
    while len(units) > length:
        smallest = min(sum(unit) for unit in units)
        pairs = [unit for unit in units if sum(unit) == smallest]
        others = [unit for unit in units if sum(unit) != smallest]
        if len(pairs) < 2:
            break
        merged = [a + b for a, b in zip(pairs[::2], pairs[1::2], strict=False)]
        units = sorted(merged + pairs[2 * len(merged) :] + others)
    return units


def permutations(items: list[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """Yields each distinct order of the items once, in lexicographic order."""
    order = sorted(items)
    while True:
        yield order
        ascent = len(order) - 2
        while ascent >= 0 and order[ascent] >= order[ascent + 1]:
            ascent -= 1
        if ascent < 0:
            return
        swap = len(order) - 1
        while order[swap] <= order[ascent]:
            swap -= 1
        order = order[:]
        order[ascent], order[swap] = order[swap], order[ascent]
        order[ascent + 1 :] = order[:ascent:-1]
