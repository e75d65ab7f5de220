"""What of an offloaded stage is on the chip, as its action table says (Zorse, section 4.1.3)."""

from __future__ import annotations

from collections.abc import Sequence

from heteropp.schedule.action import Action, Kind

BEGINS_BACKWARD = (Kind.R, Kind.B, Kind.I)
NEEDS_PARAMETERS = (Kind.F, Kind.R, Kind.B, Kind.I)

Item = tuple[int, int]  # a ministage and a micro-batch


def following(actions: Sequence[Action]) -> list[int]:
    """Returns, for each action, the next ministage to work after the one that is at work.

    Its parameters can be fetched meanwhile. After the last action the table begins anew, with the
    next step.
    """
    result = [0] * len(actions)
    other = current = 0
    for n, action in reversed(list(enumerate(actions)) * 2):
        if action.kind in NEEDS_PARAMETERS and action.ministage != current:
            other, current = current, action.ministage
        result[n] = other
    return result


def backwards(actions: Sequence[Action]) -> list[Item]:
    """Returns the ministage and micro-batch of each backward, in the order in which they begin."""
    items = [
        (action.ministage, action.micro_batch)
        for action in actions
        if action.kind in BEGINS_BACKWARD and action.micro_batch is not None
    ]
    return list(dict.fromkeys(items))
