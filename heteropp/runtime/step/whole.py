"""Chooses, on the bare host, which backwards run whole although the table cuts them in two.

What is kept for the second half has left the host's caches by the time it runs, which costs a few
percent of a step. So a stage that is busy all the time runs W at once with I; one that waits for
others sends them their gradients first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from heteropp.schedule.action import Action, Kind

Backward = tuple[int, int]  # by its ministage and micro-batch
# a stage that waits for more than this share of a step is not the slowest; the first message of
# each kind does not count
WAITED = 0.02
STEPS = 3  # so many in a row must wait, as the first steps of a run wait for more than others
RECEIVES = (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT)


class WholeBackwards:
    """The backwards that one rank runs whole; its results are bit for bit the same either way."""

    def __init__(self, table: Sequence[Action]) -> None:
        self.backwards = before_last_forward(table)
        self.steps_waited = 0

    def __contains__(self, backward: Backward) -> bool:
        return backward in self.backwards

    def learn(self, marks: Iterable[tuple[Action, float, float]]) -> None:
        """Learns when a step's actions began and ended.

        After STEPS steps in a row that waited, all backwards are cut in two again.
        """
        marks = list(marks)
        first: set[tuple[Kind, int]] = set()
        waited = 0.0
        for action, begin, end in marks:
            if action.kind in RECEIVES:
                source = action.kind, action.ministage
                waited += end - begin if source in first else 0.0
                first.add(source)
        step = marks[-1][2] - marks[0][1]
        self.steps_waited = self.steps_waited + 1 if waited > WAITED * step else 0
        if self.steps_waited == STEPS:
            self.backwards = frozenset()


def before_last_forward(table: Sequence[Action]) -> frozenset[Backward]:
    """Returns the backwards whose W comes before the last forward.

    The Ws after it stay apart, as they fill the waits at the end of the step.
    """
    last = max((i for i, action in enumerate(table) if action.kind == Kind.F), default=0)
    return frozenset(
        (action.ministage, action.micro_batch)
        for action in table[:last]
        if action.kind == Kind.W and action.micro_batch is not None
    )
