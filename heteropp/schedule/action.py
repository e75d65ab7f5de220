"""What a rank does in a step: the words of the tables that the simulator and the executor run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache


class Kind(StrEnum):
    RECV_ACTIVATION = "recv_activation"  # wait for the pieces from the ministage before
    GATHER_ACTIVATION = "gather_activation"  # all-gather them over the tensor-parallel group
    F = "F"  # forward
    SEND_ACTIVATION = "send_activation"  # start sending to the ministage after
    R = "R"  # recompute the forward, with what the backward needs kept
    RECV_GRADIENT = "recv_gradient"
    GATHER_GRADIENT = "gather_gradient"
    B = "B"  # backward, both halves at once
    I = "I"  # noqa: E741  # its first half: the gradient of the input
    SEND_GRADIENT = "send_gradient"
    W = "W"  # its second half: the gradients of the weights
    REDUCE = "reduce"  # sum gradients with all others that hold the same layers
    SWITCH = "switch"  # parameters or gradients go to another plan's layout; see mixed_lengths
    STEP = "step"  # clip, update, and gather the parameters


BACKWARD = (Kind.B, Kind.I)  # a backward, or what it begins with
COMPUTATION = frozenset({Kind.F, Kind.R, Kind.B, Kind.I, Kind.W})
Coded = tuple[int, int, int]  # an action: its kind, micro-batch (0 where none) and ministage
CODE = {kind: code for code, kind in enumerate(Kind)}  # as csrc/planner/memory_walk.h has them
GATHERS = frozenset({Kind.GATHER_ACTIVATION, Kind.GATHER_GRADIENT})


@dataclass(frozen=True)
class Action:
    kind: Kind
    # None for REDUCE, SWITCH and STEP; every slice of a sequence counts as one
    micro_batch: int | None = None
    ministage: int = 0  # which of the stage's, in the stage's own order

    @cached_property
    def coded(self) -> Coded:
        """What native code takes."""
        return CODE[self.kind], self.micro_batch or 0, self.ministage


@lru_cache(maxsize=65536)
def shared_action(kind: Kind, micro_batch: int | None = None, ministage: int = 0) -> Action:
    """Returns an action, made once for all tables that hold it."""
    return Action(kind, micro_batch, ministage)
