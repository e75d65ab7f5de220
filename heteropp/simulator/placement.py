"""Where a plan's replicas stand, their links, and which of them do the same at the same times.

None of that depends on how many layers a stage holds, on recompute or on slack, so that a search
asks for the same again and again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from heteropp.cost.planned import GroupLinks, links_by_rank
from heteropp.description.cluster import Cluster
from heteropp.description.plan import Pipeline, Plan
from heteropp.schedule.stage_actions import links
from heteropp.simulator.alike import Joint, stand_ins
from heteropp.simulator.boundaries import boundary
from hyperhetero.remembered import Remembered


@dataclass(frozen=True)
class Seat:
    """Where a replica stands in the plan."""

    pipeline: int
    stage: int
    replica: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Placement:
    """The seats of a plan, and the actors that stand for them; programs share it."""

    seats: Sequence[Seat]
    first_seats: Mapping[tuple[int, int], int]  # by pipeline and stage
    links: Mapping[int, GroupLinks]  # by rank
    seat_of: Sequence[int]  # by actor: the first of the seats that it stands for
    actor_of: Sequence[int]  # by seat: the actor that stands for it


def placement(
    plan: Plan, cluster: Cluster, emulated: bool, slowdown: Mapping[int, float], fold: bool
) -> Placement:
    """Returns a plan's placement on a cluster.

    emulated, slowdown, fold: see heteropp.simulator.program.compile_plan.
    """
    if slowdown or not fold:
        return _placement(plan, cluster, emulated, slowdown, fold)
    between = tuple(_joined(plan, pipeline) for pipeline in plan.pipelines)
    places = tuple(
        (
            lengths(plan, p),
            tuple([(s.replicas, s.sequence_parallel, s.expert_shares) for s in pipeline.stages]),
        )
        for p, pipeline in enumerate(plan.pipelines)
    )
    key = cluster, emulated, places, between, plan.resharding
    return _known.get(key, lambda: _placement(plan, cluster, emulated, {}, True))


_known: Remembered[Placement] = Remembered(16)  # each takes megabytes for thousands of chips


def _placement(
    plan: Plan, cluster: Cluster, emulated: bool, slowdown: Mapping[int, float], fold: bool
) -> Placement:
    seats = [
        Seat(p, s, r, replica.ranks)
        for p, pipeline in enumerate(plan.pipelines)
        for s, stage in enumerate(pipeline.stages)
        for r, replica in enumerate(stage.replicas)
    ]
    first_seats: dict[tuple[int, int], int] = {}
    for a, seat in enumerate(seats):
        first_seats.setdefault((seat.pipeline, seat.stage), a)
    links_of = links_by_rank(plan, cluster)
    stand_in = list(range(len(seats)))
    if fold:
        own = [
            (
                seat.pipeline,
                seat.stage,
                plan.pipelines[seat.pipeline].stages[seat.stage].replicas[seat.replica].kind,
                tuple([links_of[rank] for rank in seat.ranks]),
                factor_of(slowdown, seat),
            )
            for seat in seats
        ]
        replicas = [seat.ranks for seat in seats]
        stand_in = stand_ins(cluster, replicas, own, _joints(plan, first_seats), not emulated)
    seat_of = sorted(set(stand_in))
    number = {a: i for i, a in enumerate(seat_of)}
    return Placement(seats, first_seats, links_of, seat_of, [number[a] for a in stand_in])


def factor_of(slowdown: Mapping[int, float], seat: Seat) -> float:
    """Returns the factor of the seconds of a replica's work; slowdown: by rank."""
    return max(slowdown.get(rank, 1.0) for rank in seat.ranks) if slowdown else 1.0


def _joints(plan: Plan, first_seats: Mapping[tuple[int, int], int]) -> Iterator[Joint]:
    """Yields where messages go from stage to stage."""
    for p, pipeline in enumerate(plan.pipelines):
        joined = _joined(plan, pipeline)
        for s, t in sorted(joined | {(t, s) for s, t in joined}):
            one, other = pipeline.stages[s], pipeline.stages[t]
            for length in dict.fromkeys(lengths(plan, p)):
                joint = boundary(one, other, length, plan.resharding)
                yield first_seats[p, s], first_seats[p, t], joint


def _joined(plan: Plan, pipeline: Pipeline) -> frozenset[tuple[int, int]]:
    """Returns the pairs of stages between which activations go."""
    return frozenset((s, t) for (s, _), (t, _) in links(plan.schedule, pipeline) if s != t)


def lengths(plan: Plan, p: int) -> tuple[int, ...]:
    """Returns the tokens of a sequence in each of the slices that go through a pipeline."""
    return plan.pipelines[p].token_slices or (plan.model.sequence_length,)
