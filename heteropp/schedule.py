"""What every replica does in a step: one table of actions for the simulator and the executor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from heteropp.plan import Pipeline


class Kind(StrEnum):
    RECV_ACTIVATION = "recv_activation"  # wait for the pieces from the stage before
    GATHER_ACTIVATION = "gather_activation"  # all-gather them over the tensor-parallel group
    F = "F"  # forward
    SEND_ACTIVATION = "send_activation"  # start sending to the stage after
    R = "R"  # recompute the forward, with what the backward needs kept
    RECV_GRADIENT = "recv_gradient"
    GATHER_GRADIENT = "gather_gradient"
    B = "B"  # backward
    SEND_GRADIENT = "send_gradient"
    REDUCE = "reduce"  # sum gradients over the replicas of the stage
    STEP = "step"  # clip, update, and gather the parameters


@dataclass(frozen=True)
class Action:
    kind: Kind
    micro_batch: int | None = None  # None for REDUCE and STEP


def one_f_one_b(pipeline: Pipeline, stage: int) -> list[Action]:
    """1F1B: stage s of P runs P - s - 1 forwards ahead, then alternates.

    The recompute of a micro-batch stands before the wait for its gradient, so that it fills it.
    """
    count, last = pipeline.micro_batches, len(pipeline.stages) - 1
    warm_up = min(last - stage, count)
    actions: list[Action] = []
    for micro_batch in range(warm_up):
        actions += _forward(pipeline, stage, micro_batch)
    for micro_batch in range(count - warm_up):
        actions += _forward(pipeline, stage, micro_batch + warm_up)
        actions += _backward(pipeline, stage, micro_batch)
    for micro_batch in range(count - warm_up, count):
        actions += _backward(pipeline, stage, micro_batch)
    return [*actions, Action(Kind.REDUCE), Action(Kind.STEP)]


def in_flight(pipeline: Pipeline, stage: int) -> int:
    """The most micro-batches whose activations a stage holds at once under 1F1B."""
    return min(len(pipeline.stages) - stage, pipeline.micro_batches)


def _forward(pipeline: Pipeline, stage: int, micro_batch: int) -> list[Action]:
    kinds = [Kind.F]
    if stage > 0:
        kinds = [*_receive(pipeline, stage, Kind.RECV_ACTIVATION, Kind.GATHER_ACTIVATION), Kind.F]
    if stage < len(pipeline.stages) - 1:
        kinds.append(Kind.SEND_ACTIVATION)
    return [Action(kind, micro_batch) for kind in kinds]


def _backward(pipeline: Pipeline, stage: int, micro_batch: int) -> list[Action]:
    kinds = [Kind.R] if pipeline.stages[stage].recompute else []
    if stage < len(pipeline.stages) - 1:
        kinds += _receive(pipeline, stage, Kind.RECV_GRADIENT, Kind.GATHER_GRADIENT)
    kinds.append(Kind.B)
    if stage > 0:
        kinds.append(Kind.SEND_GRADIENT)
    return [Action(kind, micro_batch) for kind in kinds]


def _receive(pipeline: Pipeline, stage: int, receive: Kind, gather: Kind) -> list[Kind]:
    return [receive, gather] if pipeline.stages[stage].tp > 1 else [receive]
