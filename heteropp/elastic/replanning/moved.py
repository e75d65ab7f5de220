"""What a change of plans moves, counted without saying who sends it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from heteropp.description.plan import Plan
from heteropp.layout.boxes import Box, uncovered
from heteropp.state.slices.holdings import holdings
from heteropp.state.slices.quantities import Quantity, quantities_of

Held = dict[tuple[str, Quantity], set[Box]]  # by parameter


def moved_bytes(old: Plan, new: Plan, old_rank_of: Sequence[int | None]) -> int:
    """Bytes of parameters and optimizer state that the new plan's ranks do not have yet.

    old_rank_of: by new rank, its chip's rank in the old plan; None: it had none.
    """
    total = 0
    for rank, was in enumerate(old_rank_of):
        had = _held(old, was) if was is not None else {}
        for (name, quantity), boxes in _held(new, rank).items():
            lacking = uncovered(boxes, had.get((name, quantity), ()))
            total += quantity.itemsize * sum(math.prod(box.shape) for box in lacking)
    return total


def _held(plan: Plan, rank: int) -> Held:
    found: Held = defaultdict(set)
    for holding in holdings(plan, rank, quantities_of(plan.model)):
        found[holding.name, holding.quantity].add(holding.box)
    return found
