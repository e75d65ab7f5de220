"""Metis's layer load balancing: layers by the stages' speed, then by their memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from heteropp.search.metis_cost import Boundaries
from heteropp.search.metis_problem import Sums

SPARE = 0.9  # of its memory is what a stage that ran out is given layers for
ENOUGH = 0.01  # of the work may stay without a place


def partition(speeds: Sequence[float], layer_shares: Sums) -> Boundaries:
    """Returns the boundaries between layers that share the work nearest to the stages' speeds.

    The speeds add up to 1. Each stage has at least one layer. layer_shares: running sums of the
    layers' work, up to 1.
    """
    layers, reached, boundaries = len(layer_shares) - 1, 0.0, [0]
    for stage, speed in enumerate(speeds[:-1]):
        reached += speed
        after = bisect_left(layer_shares, reached)
        nearest = after - (2 * reached < layer_shares[after - 1] + layer_shares[min(after, layers)])
        left = len(speeds) - 1 - stage  # stages that need a layer each
        boundaries.append(min(max(nearest, boundaries[-1] + 1), layers - left))
    return (*boundaries, layers)


def relieved(
    speeds: Sequence[float], needs: Sequence[float], rooms: Sequence[float]
) -> list[float] | None:
    """Returns speeds that move work from stages short of memory to those with some to spare.

    The work goes to the others by their speed, each up to its memory. None if they have too little.
    """
    spare, new, missing = [], [], 0.0
    for speed, need, room in zip(speeds, needs, rooms, strict=True):
        short = need >= room
        new.append(speed * room / need * SPARE if short else speed)
        spare.append(0.0 if short else speed * room / need - speed)
        missing += speed - new[-1]
    if sum(spare) < missing:
        return None
    while missing > ENOUGH:
        takers = [stage for stage, share in enumerate(spare) if share > 1e-3]
        total, before = sum(speeds[stage] for stage in takers), missing
        for stage in takers:
            given = min(spare[stage], before * speeds[stage] / total)
            new[stage] += given
            spare[stage] -= given
            missing -= given
        if not takers:
            break  # what is left to spare is too little to count
    return new
