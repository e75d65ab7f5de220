"""What every replica does in a step: one table of actions for the simulator and the executor.

orders.py says in which order a stage computes; here the messages are put around it. A recompute
stands before the wait for the gradient, so that it fills it, and the gradient of the input leaves
before those of the weights are computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from heteropp.action import Action, Kind
from heteropp.orders import order
from heteropp.plan import Pipeline, Schedule, ministage_layers

Part = tuple[int, int]  # a stage, and which of its ministages


def actions(
    schedule: Schedule, pipeline: Pipeline, stage: int, overlap: bool = True
) -> list[Action]:
    """All that a replica of a stage does in a step, in order.

    Gradients of a ministage are reduced as soon as they are whole; nothing waits for that but
    the step. Without overlap a recompute comes after the wait for the gradient.
    """
    places = _places(schedule, pipeline, stage)
    count, ministages = pipeline.micro_batches, len(places)
    table: list[Action] = []
    for kind, micro_batch, ministage in order(
        schedule, len(pipeline.stages), stage, count, ministages
    ):
        kinds = [Kind.W]
        if kind == Kind.F:
            kinds = places[ministage].forward
        elif kind in (Kind.B, Kind.I):
            kinds = places[ministage].backward(kind, overlap)
        table += [Action(k, micro_batch, ministage) for k in kinds]
        if kind in (Kind.B, Kind.W) and micro_batch == count - 1:
            table.append(Action(Kind.REDUCE, None, ministage))
    return [*table, Action(Kind.STEP)]


def in_flight(schedule: Schedule, pipeline: Pipeline, stage: int) -> float:
    """The most micro-batches whose activations a stage holds at once.

    In units of the activations of all its layers: each ministage counts as its share of them.
    What a backward works on is held until its W has ended.
    """
    stages, micro_batches = len(pipeline.stages), pipeline.micro_batches
    if schedule == "1f1b":
        return float(min(stages - stage, micro_batches))
    if schedule == "gpipe":
        return float(micro_batches)
    sizes = tuple(last - first for first, last in ministage_layers(pipeline, schedule)[stage])
    return _most_held(schedule, stages, stage, micro_batches, sizes) / sum(sizes)


@lru_cache(maxsize=65536)
def _most_held(
    schedule: str, stages: int, stage: int, micro_batches: int, sizes: tuple[int, ...]
) -> int:
    """The most layers' activations held at once."""
    held = most = 0
    for kind, _, ministage in order(schedule, stages, stage, micro_batches, len(sizes)):
        if kind == Kind.F:
            held += sizes[ministage]
            most = max(most, held)
        elif kind in (Kind.B, Kind.W):
            held -= sizes[ministage]
    return most


def bubble_coefficient(schedule: Schedule, ministages: int = 1) -> float:
    """Alpha of section 4.3.2: the bubble, as a share of the other stages' micro-batch times.

    As published: H2 sets 1 for 1F1B and 0 for ZB-V; ZB-H1 leaves F + I - W, a third of it where
    the three are equal; ministages divide it.
    """
    return {
        "1f1b": 1.0,
        "gpipe": 1.0 / ministages,
        "interleaved-1f1b": 1.0 / ministages,
        "zb-h1": 1.0 / 3.0,
        "zb-v": 0.0,
    }[schedule]


def path(schedule: Schedule, pipeline: Pipeline) -> list[Part]:
    """Every (stage, ministage) of a pipeline, in the order in which the model runs."""
    held = ministage_layers(pipeline, schedule)
    parts = [(first, s, k) for s, own in enumerate(held) for k, (first, _) in enumerate(own)]
    return [(s, k) for _, s, k in sorted(parts)]


@dataclass(frozen=True)
class _Place:
    """What surrounds a ministage: whether messages come and go, or its own stage hands over."""

    receives: bool  # activations, from another stage
    sends: bool  # activations, to another stage
    recompute: bool
    gathers: bool

    @property
    def forward(self) -> list[Kind]:
        kinds = self._receive(self.receives, Kind.RECV_ACTIVATION, Kind.GATHER_ACTIVATION)
        return [*kinds, Kind.F, *([Kind.SEND_ACTIVATION] if self.sends else [])]

    def backward(self, kind: Kind, overlap: bool) -> list[Kind]:
        recompute = [Kind.R] if self.recompute else []
        wait = self._receive(self.sends, Kind.RECV_GRADIENT, Kind.GATHER_GRADIENT)
        return [
            *(recompute + wait if overlap else wait + recompute),
            kind,
            *([Kind.SEND_GRADIENT] if self.receives else []),
        ]

    def _receive(self, comes: bool, receive: Kind, gather: Kind) -> list[Kind]:
        if not comes:
            return []
        return [receive, gather] if self.gathers else [receive]


def _places(schedule: Schedule, pipeline: Pipeline, stage: int) -> list[_Place]:
    """By ministage of the stage."""
    parts, own = path(schedule, pipeline), pipeline.stages[stage]
    stages = [None, *(s for s, _ in parts), None]
    places = []
    for k in range(own.ministages):
        i = parts.index((stage, k))
        before, after = stages[i], stages[i + 2]
        places.append(
            _Place(
                before not in (None, stage), after not in (None, stage), own.recompute, own.tp > 1
            )
        )
    return places
