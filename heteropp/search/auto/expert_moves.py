"""The neighbours of a plan whose experts lie over other ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from heteropp.description.plan import Plan, Stage
from heteropp.search.auto.changed import places, with_each, with_one
from heteropp.search.auto.freedom import Freedom
from heteropp.search.auto.spreading import DEGREES, WAYS, By, degrees, gathered, spread

STEPS = (1, 2, 4)  # experts that move at once


def expert_parallel(plan: Plan, freedom: Freedom) -> Iterator[Plan]:
    """Experts lie over groups in another way, in all stages at once or in one."""
    most = freedom.expert_parallel
    if most == 1:
        return
    if plan.has_expert_parallelism:
        yield with_each(plan, gathered)
    yield from spread_everywhere(plan, freedom)
    for p, s, stage in places(plan):
        if stage.ep > 1:
            yield with_one(plan, p, s, gathered(stage))
            for shares in _moved_experts(stage):
                yield with_one(plan, p, s, replace(stage, expert_shares=shares))
        for degree, by in itertools.product(degrees(stage, most), WAYS):
            yield with_one(plan, p, s, spread(stage, freedom, degree, by))


def spread_everywhere(plan: Plan, freedom: Freedom) -> Iterator[Plan]:
    """Experts lie over groups in all stages, in each of the ways there are."""
    if freedom.expert_parallel > 1:
        for by, n in itertools.product(WAYS, range(DEGREES)):
            yield with_each(plan, lambda stage: _nth_spread(stage, freedom, n, by))  # noqa: B023


def _nth_spread(stage: Stage, freedom: Freedom, n: int, by: By) -> Stage:
    """Returns a stage with the n-th of its largest expert-parallel degrees, or as it is."""
    found = degrees(stage, freedom.expert_parallel)
    return spread(stage, freedom, found[n], by) if n < len(found) else stage


def _moved_experts(stage: Stage) -> Iterator[tuple[int, ...]]:
    """Yields shares of which experts go from the most that a chip type has to another's least."""
    shares, chips = stage.expert_shares or (), stage.chips
    for giver, taker in itertools.permutations(dict.fromkeys(chips[: stage.ep]), 2):
        source = max(
            (i for i in range(stage.ep) if chips[i] == giver), key=lambda i: (shares[i], -i)
        )
        target = min(
            (i for i in range(stage.ep) if chips[i] == taker), key=lambda i: (shares[i], i)
        )
        for step in STEPS:
            if shares[source] > step:
                moved = list(shares)
                moved[source] -= step
                moved[target] += step
                yield tuple(moved)
