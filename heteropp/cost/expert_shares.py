"""How many experts of a layer each rank gets, so that all are done with theirs in the same time."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from heteropp.models.spec import ModelError, ModelSpec


def expert_shares(model: ModelSpec, speeds: Sequence[float]) -> tuple[int, ...]:
    """Returns how many experts of every layer each of some ranks holds, one at least.

    Experts are taken to be given as many rows as any other, wherever the rows come from: no other
    numbers keep the slowest rank for less time.

    speeds: of the ranks, relative to each other. Raises ModelError where the model has fewer
    experts than there are ranks, and for one whose experts cannot lie over ranks.
    """
    if problem := model.expert_parallel_problem():
        raise ModelError(problem)
    if len(speeds) < 2 or not all(0 < speed < inf for speed in speeds):
        raise ModelError(
            f"speeds is {list(speeds)}; expected those of at least two ranks, all above 0"
        )
    if len(speeds) > model.expert_count:
        raise ModelError(
            f"the model's {model.expert_count} experts are too few for {len(speeds)} ranks, of "
            "which each holds one at least"
        )
    shares = [1] * len(speeds)
    for _ in range(model.expert_count - len(shares)):
        rank = min(range(len(shares)), key=lambda i: ((shares[i] + 1) / speeds[i], i))
        shares[rank] += 1
    return tuple(shares)
