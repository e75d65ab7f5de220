"""What every replica does in a step: one table of actions for the simulator and the executor.

orders.py says in which order a stage computes; here the messages are put around it. A recompute
stands before the wait for the gradient, so that it fills it, and the gradient of the input leaves
before those of the weights are computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from heteropp.description.plan import Pipeline, Schedule, ministage_layers
from heteropp.schedule.action import Action, Coded, Kind, shared_action
from heteropp.schedule.orders import Work, in_parts, in_slices, order, put_off

Part = tuple[int, int]  # a stage, and which of its ministages
Paths = tuple[tuple[Part, ...], ...]  # in the order in which the model runs


class TableKey(NamedTuple):
    """What a stage's table of actions depends on, of all that a pipeline says."""

    schedule: Schedule
    stages: int
    stage: int
    micro_batches: int
    slices: int
    ministages: int
    slack: int
    parts: int
    ends: tuple[int, ...]  # the ministages with the model's last layer
    places: tuple[_Place, ...]  # by ministage
    overlap: bool
    whole_backwards: bool


def table_key(
    schedule: Schedule,
    pipeline: Pipeline,
    stage: int,
    overlap: bool = True,
    whole_backwards: bool = False,
) -> TableKey:
    """Returns the key of a stage's table; see `actions`."""
    joined = paths(schedule, pipeline)
    return _table_key(schedule, pipeline, joined, stage, overlap, whole_backwards)


def table_keys(schedule: Schedule, pipeline: Pipeline) -> tuple[TableKey, ...]:
    """Returns the key of every stage's table."""
    joined, stages = paths(schedule, pipeline), range(len(pipeline.stages))
    return tuple([_table_key(schedule, pipeline, joined, s, True, False) for s in stages])


def _table_key(
    schedule: Schedule,
    pipeline: Pipeline,
    joined: Paths,
    stage: int,
    overlap: bool,
    whole_backwards: bool,
) -> TableKey:
    own, parts = pipeline.stages[stage], pipeline.parts(stage)
    ends = {k for *_, (s, k) in joined if s == stage} if parts > 1 else ()
    return TableKey(
        schedule,
        len(pipeline.stages),
        stage,
        pipeline.micro_batches,
        pipeline.slices,
        own.ministages,
        own.slack,
        parts,
        tuple(sorted(ends)),
        tuple(_places(joined, pipeline, stage)),
        overlap,
        whole_backwards,
    )


def actions(
    schedule: Schedule,
    pipeline: Pipeline,
    stage: int,
    overlap: bool = True,
    whole_backwards: bool = False,
) -> list[Action]:
    """All that a replica of a stage does in a step, in order.

    Gradients of a ministage are reduced as soon as they are whole; nothing waits for that but
    the step. A backward is cut in two where its first half has a gradient to send. Without overlap
    a recompute comes after the wait for the gradient. `whole_backwards`: a backward is not cut,
    unless the schedule does so itself.
    """
    return list(table_of(table_key(schedule, pipeline, stage, overlap, whole_backwards)))


@lru_cache(maxsize=4096)
def table_of(key: TableKey) -> tuple[Action, ...]:
    """Returns the table of a key. A search asks for the same ones again and again."""
    works = _works(key)
    last = {k: i for kind, i, k in works if kind in (Kind.B, Kind.W)}
    around = {
        (kind, k): place.around(kind, key.overlap, key.whole_backwards)
        for k, place in enumerate(key.places)
        for kind in (Kind.F, Kind.B, Kind.I, Kind.W)
    }
    table: list[Action] = []
    for kind, micro_batch, ministage in works:
        table += [shared_action(k, micro_batch, ministage) for k in around[kind, ministage]]
        if kind in (Kind.B, Kind.W) and micro_batch == last[ministage]:
            table.append(shared_action(Kind.REDUCE, None, ministage))
    return (*table, shared_action(Kind.STEP))


@lru_cache(maxsize=4096)
def reductions_in(key: TableKey) -> Mapping[int, int]:
    """Returns where in the table of a key gradients are reduced, by ministage, in that order."""
    table = table_of(key)
    return {a.ministage: i for i, a in enumerate(table) if a.kind == Kind.REDUCE}


@lru_cache(maxsize=4096)
def coded_table(key: TableKey) -> tuple[Coded, ...]:
    """Returns the table of a key as native code takes it."""
    return tuple(action.coded for action in table_of(key))


def late_and_ahead(slack: int, stage: int) -> tuple[int, int]:
    """What 1F1B does with a stage's slack: how many Ws it puts off, and forwards it runs ahead.

    As many Ws as ZB-H1 puts off fill the end of the step; more than that keeps the stages after
    this one busy while messages are on their way.
    """
    later = min(slack, stage)
    return later, slack - later


def works_of(schedule: Schedule, pipeline: Pipeline, stage: int) -> Sequence[Work]:
    """Returns what a stage computes, in order, by its own micro-batches."""
    return _works(table_key(schedule, pipeline, stage))


def _works(key: TableKey) -> Sequence[Work]:
    works: Sequence[Work]
    later, ahead = late_and_ahead(key.slack, key.stage)
    # a stage with more after it runs more forwards ahead
    stages = key.stages + ahead
    if key.slices > 1:
        works = in_slices(key.schedule, stages, key.stage, key.micro_batches, key.slices)
    else:
        works = order(key.schedule, stages, key.stage, key.micro_batches, key.ministages)
    if later:
        works = put_off(works, later)
    return works if key.parts == 1 else in_parts(works, key.parts, key.ends)


def bubble_coefficient(schedule: Schedule, ministages: int = 1) -> float:
    """Alpha of section 4.3.2: the bubble, as a share of the other stages' micro-batch times.

    As published: H2 sets 1 for 1F1B and 0 for ZB-V; ZB-H1 leaves F + I - W, a third of it where
    the three are equal; ministages divide it; Chimera has one from each end, half as long.
    """
    return {
        "1f1b": 1.0,
        "gpipe": 1.0 / ministages,
        "interleaved-1f1b": 1.0 / ministages,
        "zb-h1": 1.0 / 3.0,
        "zb-v": 0.0,
        "chimera": 0.5,
    }[schedule]


def paths(schedule: Schedule, pipeline: Pipeline) -> Paths:
    """Every (stage, ministage) of a pipeline, in the order in which the model runs.

    Chimera's model runs through two of them, down and up; all others' through one.
    """
    if schedule == "chimera":
        stages = range(len(pipeline.stages))
        return tuple((s, 0) for s in stages), tuple((s, 1) for s in reversed(stages))
    return (_by_layer(ministage_layers(pipeline, schedule)),)


@lru_cache(maxsize=4096)
def _by_layer(held: tuple[tuple[tuple[int, int], ...], ...]) -> tuple[Part, ...]:
    parts = [(first, s, k) for s, own in enumerate(held) for k, (first, _) in enumerate(own)]
    return tuple((s, k) for _, s, k in sorted(parts))


def links(schedule: Schedule, pipeline: Pipeline) -> list[tuple[Part, Part]]:
    """The parts between which activations go one way, and gradients the other."""
    return _links(paths(schedule, pipeline))


def _links(joined: Paths) -> list[tuple[Part, Part]]:
    return [link for path in joined for link in pairwise(path)]


@lru_cache(maxsize=4096)
def _neighbours(joined: Paths) -> tuple[dict[Part, int], dict[Part, int]]:
    """Returns the stage before each part of a pipeline, and the stage after it."""
    between = _links(joined)
    return {part: s for (s, _), part in between}, {part: s for part, (s, _) in between}


@dataclass(frozen=True)
class _Place:
    """What surrounds a ministage: whether messages come and go, or its own stage hands over."""

    receives: bool  # activations, from another stage
    sends: bool  # activations, to another stage
    recompute: bool
    gathers: bool

    def around(self, kind: Kind, overlap: bool, whole: bool) -> list[Kind]:
        """Returns what a replica does for a computation, in order: the computation or its two
        halves, with the messages around it.
        """
        if kind == Kind.F:
            return self._forward()
        if kind == Kind.W:
            return [kind]
        return self._backward(kind, overlap, whole)

    def _forward(self) -> list[Kind]:
        kinds = self._receive(self.receives, Kind.RECV_ACTIVATION, Kind.GATHER_ACTIVATION)
        return [*kinds, Kind.F, *([Kind.SEND_ACTIVATION] if self.sends else [])]

    def _backward(self, kind: Kind, overlap: bool, whole: bool) -> list[Kind]:
        recompute = [Kind.R] if self.recompute else []
        wait = self._receive(self.sends, Kind.RECV_GRADIENT, Kind.GATHER_GRADIENT)
        before = recompute + wait if overlap else wait + recompute
        if not self.receives:
            return [*before, kind]
        if kind == Kind.B and not whole:
            return [*before, Kind.I, Kind.SEND_GRADIENT, Kind.W]
        return [*before, kind, Kind.SEND_GRADIENT]

    def _receive(self, comes: bool, receive: Kind, gather: Kind) -> list[Kind]:
        if not comes:
            return []
        return [receive, gather] if self.gathers else [receive]


def _places(joined: Paths, pipeline: Pipeline, stage: int) -> list[_Place]:
    """Returns the surroundings of each ministage of a stage."""
    own = pipeline.stages[stage]
    into, out_of = _neighbours(joined)
    places = []
    for k in range(own.ministages):
        before, after = into.get((stage, k)), out_of.get((stage, k))
        places.append(
            _Place(
                before not in (None, stage),
                after not in (None, stage),
                own.recompute,
                own.tp > 1 and not own.sequence_parallel,
            )
        )
    return places
