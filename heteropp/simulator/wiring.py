"""The messages of a plan: from which replica to which, through which pipes, for how long.

None of that depends on how many layers a stage holds, on recompute or on slack, so that a search
asks for the same again and again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from weakref import WeakKeyDictionary

from heteropp.description.cluster import Cluster
from heteropp.description.plan import Pipeline, Plan
from heteropp.schedule.action import Kind
from heteropp.schedule.stage_actions import links
from heteropp.simulator.boundaries import Way, boundary
from heteropp.simulator.engine import Boxes, Transmission
from heteropp.simulator.placement import Placement, lengths
from heteropp.simulator.twins import without_twins

Turns = tuple[tuple[tuple[Kind, int], int], ...]


@dataclass(frozen=True, eq=False)
class Wiring:
    """The messages between a plan's actors; programs share it."""

    boxes: Sequence[Boxes]  # by actor
    # by pipeline and stage: the boxes that the messages of a kind and ministage take in turn
    turns: Mapping[tuple[int, int], Turns]


_known: WeakKeyDictionary[Placement, dict[Hashable, Wiring]] = WeakKeyDictionary()


def wiring(
    plan: Plan, cluster: Cluster, placed: Placement, emulated: bool, message_factor: float
) -> Wiring:
    """Returns the messages of a plan whose replicas are placed so.

    emulated, message_factor: see heteropp.simulator.program.compile_plan.
    """
    key = (
        message_factor,
        row_bytes(plan),
        tuple(
            (
                tuple(links(plan.schedule, pipeline)),
                tuple([(pipeline.parts(s), st.ministages) for s, st in enumerate(pipeline.stages)]),
            )
            for pipeline in plan.pipelines
        ),
    )
    known = _known.setdefault(placed, {})
    if key not in known:
        known[key] = _Wires(plan, cluster, placed, emulated, message_factor).wiring()
    return known[key]


def boxes_of(pipeline: Pipeline, stage: int) -> int:
    """Returns how many boxes each way of a ministage's messages has, at most."""
    return pipeline.parts(stage) * pipeline.slices


def row_bytes(plan: Plan) -> int:
    """Returns the bytes of one token in a boundary tensor."""
    return plan.model.hidden * plan.model.dtype_bytes


class _Wires:
    def __init__(
        self,
        plan: Plan,
        cluster: Cluster,
        placed: Placement,
        emulated: bool,
        message_factor: float,
    ) -> None:
        self.plan, self.cluster, self.placed = plan, cluster, placed
        self.emulated, self.message_factor = emulated, message_factor
        self.pipes: dict[Hashable, int] = {}
        self.outboxes: list[list[list[Transmission]]] = []
        self.inboxes: list[list[list[int]]] = []
        for seat in (placed.seats[a] for a in placed.seat_of):
            pipeline = plan.pipelines[seat.pipeline]
            boxes = boxes_of(pipeline, seat.stage)
            slots = range(2 * pipeline.stages[seat.stage].ministages * boxes)
            self.outboxes.append([[] for _ in slots])
            self.inboxes.append([[] for _ in slots])
        self.turns: dict[tuple[int, int], dict[tuple[Kind, int], int]] = defaultdict(dict)

    def wiring(self) -> Wiring:
        for p in range(len(self.plan.pipelines)):
            self._connect(p)
        boxes = without_twins([*map(Boxes, self.outboxes, self.inboxes)])
        turns = {
            place: tuple(sorted(self.turns[place].items())) for place in self.placed.first_seats
        }
        return Wiring(boxes, turns)

    def _connect(self, p: int) -> None:
        """Makes a pipeline's messages: activations along its path, and gradients back."""
        pipeline = self.plan.pipelines[p]
        for (s, k), (t, j) in links(self.plan.schedule, pipeline):
            if s == t:
                continue
            one, other = pipeline.stages[s], pipeline.stages[t]
            many, others = boxes_of(pipeline, s), boxes_of(pipeline, t)
            for i, length in enumerate(lengths(self.plan, p)):
                outbox, inbox = many * k + i, others * j + i
                self._send((p, s), (p, t), outbox, inbox, length)
                outbox = others * (other.ministages + j) + i
                inbox = many * (one.ministages + k) + i
                self._send((p, t), (p, s), outbox, inbox, length)
            rows = lcm(one.micro_batch, other.micro_batch) * pipeline.slices
            for kind in (Kind.SEND_ACTIVATION, Kind.RECV_GRADIENT):
                self.turns[p, s][kind, k] = rows // one.micro_batch
            for kind in (Kind.RECV_ACTIVATION, Kind.SEND_GRADIENT):
                self.turns[p, t][kind, j] = rows // other.micro_batch

    def _send(
        self, one: tuple[int, int], other: tuple[int, int], outbox: int, inbox: int, length: int
    ) -> None:
        """Makes the messages from one stage to another that carry sequences of a length.

        outbox and inbox are the first of their boxes: where the stages' micro-batches differ in
        size, those that make up the common multiple take one box each in turn. So do slices.
        """
        sender, receiver = (self.plan.pipelines[p].stages[s] for p, s in (one, other))
        first, others = self.placed.first_seats[one], self.placed.first_seats[other]
        joint = boundary(sender, receiver, length, self.plan.resharding)
        for r, ways in enumerate(joint.ways):
            a = self.placed.actor_of[first + r]
            if self.placed.seat_of[a] != first + r:
                continue
            for _, destination, source, way in sorted(self._ranks_of(ways, first + r, others)):
                b = self.placed.actor_of[others + way.receiver]
                latency_s, pipes = self._way(source, destination, way.rows * row_bytes(self.plan))
                into = inbox + way.into
                self.outboxes[a][outbox + way.turn].append(Transmission(b, into, latency_s, pipes))
                self.inboxes[b][into].append(a)

    def _ranks_of(
        self, ways: Sequence[Way], sender: int, receivers: int
    ) -> Iterator[tuple[int, int, int, Way]]:
        """Yields ways in the order of rows and receiving ranks, with their ranks.

        sender: a seat. receivers: the first seat of their stage.
        """
        ranks = self.placed.seats[sender].ranks
        for way in ways:
            destination = self.placed.seats[receivers + way.receiver].ranks[way.destination]
            yield way.number, destination, ranks[way.source], way

    def _way(
        self, source: int, destination: int, size_bytes: float
    ) -> tuple[float, tuple[tuple[int, float], ...]]:
        size_bytes *= self.message_factor
        if self.emulated:
            link = self.cluster.link(source, destination)
            latency_s = link.latency_s * self.message_factor
            return latency_s, ((self._pipe((source, destination)), size_bytes / link.bytes_per_s),)
        route = self.cluster.route(source, destination)
        return route.latency_s * self.message_factor, tuple(
            (self._pipe(pipe.name), size_bytes / pipe.bytes_per_s) for pipe in route.pipes
        )

    def _pipe(self, name: object) -> int:
        return self.pipes.setdefault(name, len(self.pipes))
