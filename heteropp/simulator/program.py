"""A plan on a cluster as actors for the engine: seconds, messages and who reduces with whom.

An actor is one replica of a stage, whose ranks work in step, and stands for all that do the same at
the same times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import lcm

from heteropp.cost.communication import gather_boundary_s
from heteropp.cost.planned import (
    GroupLinks,
    slowest_link,
    span_times,
    stage_shape,
)
from heteropp.cost.stage_time import Time, all_gather_s
from heteropp.description.cluster import Cluster
from heteropp.description.plan import Pipeline, Plan, Stage, ministage_layers
from heteropp.layout.resharding import group_boxes
from heteropp.schedule.action import Action, Kind
from heteropp.schedule.stage_actions import TableKey, links, reductions_in, table_key, table_of
from heteropp.simulator.boundaries import Way, boundary
from heteropp.simulator.engine import MARK, RECV, SEND, WORK, Actor, Op, Transmission
from heteropp.simulator.gradients import reductions
from heteropp.simulator.placement import Seat, factor_of, lengths, placement
from heteropp.simulator.reductions import ReductionGroup
from heteropp.simulator.together import joined, slowest

WORKS = (
    Kind.F,
    Kind.R,
    Kind.B,
    Kind.I,
    Kind.W,
    Kind.GATHER_ACTIVATION,
    Kind.GATHER_GRADIENT,
)


@dataclass(frozen=True)
class Program:
    seats: Sequence[Seat]
    tables: list[Sequence[Action]]  # by seat; one op each, but for the step at the end
    reduces_at: list[Mapping[int, int]]  # by seat and ministage: the place of REDUCE in its table
    actors: list[Actor]
    seat_of: Sequence[int]  # by actor: the first of the seats that it stands for
    actor_of: Sequence[int]  # by seat: the actor that stands for it
    groups: list[ReductionGroup]  # of seats
    reductions: list[list[list[int]]]  # by seat and ministage: its groups, in order
    begin_s: list[float]  # by seat: how much later than the first it begins
    norm_s: list[float]  # by seat: computing its norms, before all ranks exchange them
    exchange_s: float  # that exchange
    update_s: list[float]  # by seat: its update, after that exchange


def compile_plan(
    plan: Plan,
    cluster: Cluster,
    emulated: bool,
    slowdown: Mapping[int, float],
    message_factor: float = 1.0,
    whole_backwards: bool = False,
    fold: bool = True,
) -> Program:
    """Returns the program of one step of a plan.

    `emulated`: every pair of ranks has a link of its own, as emulated chips do.

    `slowdown` by rank: factors of the seconds of its work. `message_factor`: of the seconds of
    every message between stages. `whole_backwards`: see heteropp.schedule.stage_actions.actions.
    `fold`: an actor stands for all replicas that do the same at the same times.
    """
    compiler = _Compiler(plan, cluster, emulated, slowdown, message_factor, fold)
    return compiler.program(whole_backwards)


class _Compiler:
    def __init__(
        self,
        plan: Plan,
        cluster: Cluster,
        emulated: bool,
        slowdown: Mapping[int, float],
        message_factor: float,
        fold: bool,
    ) -> None:
        self.plan, self.cluster, self.emulated = plan, cluster, emulated
        self.message_factor = message_factor
        placed = placement(plan, cluster, emulated, slowdown, fold)
        self.seats, self.first_seats, self.links = placed.seats, placed.first_seats, placed.links
        self.seat_of, self.actor_of = placed.seat_of, placed.actor_of
        self.layers = [ministage_layers(pipeline, plan.schedule) for pipeline in plan.pipelines]
        self.known_times: dict[Hashable, list[list[Time]]] = {}  # of seats that are alike
        of_actors = [self._times(self.seats[a]) for a in self.seat_of]
        self.times = [of_actors[actor] for actor in self.actor_of]  # by seat
        self.slowdown = [factor_of(slowdown, seat) for seat in self.seats]
        self.pipes: dict[object, int] = {}
        self.outboxes: list[list[list[Transmission]]] = []
        self.inboxes: list[list[list[int]]] = []
        for seat in (self.seats[a] for a in self.seat_of):
            many = boxes_of(plan.pipelines[seat.pipeline], seat.stage)
            slots = range(2 * self._stage(seat).ministages * many)
            self.outboxes.append([[] for _ in slots])
            self.inboxes.append([[] for _ in slots])
        # by (pipeline, stage), then kind and ministage: the boxes that messages take in turn
        self.turns: dict[tuple[int, int], dict[tuple[Kind, int], int]] = defaultdict(dict)

    def program(self, whole_backwards: bool) -> Program:
        for p in range(len(self.plan.pipelines)):
            self._connect(p)
        tables: dict[tuple[int, int], Sequence[Action]] = {}
        reduces_at: dict[tuple[int, int], Mapping[int, int]] = {}
        ops: dict[tuple[int, int], list[Op]] = {}
        for p, pipeline in enumerate(self.plan.pipelines):
            for s in range(len(pipeline.stages)):
                key = table_key(self.plan.schedule, pipeline, s, self.plan.overlap, whole_backwards)
                tables[p, s], reduces_at[p, s] = table_of(key), reductions_in(key)
                ops[p, s] = _ops(key, tuple(sorted(self.turns[p, s].items())))
        seats_of: dict[tuple[int, int], list[int]] = defaultdict(list)
        for a, seat in enumerate(self.seats):
            seats_of[seat.pipeline, seat.stage].append(a)
        # of each ministage, for what no slice changes
        of_steps = [[slices[0] for slices in times] for times in self.times]
        reduce_s = [[time.reduce_s for time in times] for times in of_steps]
        groups, taken = reductions(self.plan, self.cluster, seats_of, reduce_s, reduces_at)
        pairs = list(zip(self.slowdown, of_steps, strict=True))
        norm_s = [slow * sum(time.norm_s for time in times) for slow, times in pairs]
        # beside its update, a stage that offloads waits for its first ministage's parameters
        update_s = [
            slow * sum(time.update_s for time in times) + times[0].load_s for slow, times in pairs
        ]
        least_s = min(update_s)
        begin_s = [own_s - least_s for own_s in update_s]
        actors = [
            Actor(
                ops=ops[self.seats[a].pipeline, self.seats[a].stage],
                seconds=self._seconds(a),
                outboxes=outboxes,
                inboxes=inboxes,
                begin_s=begin_s[a],
            )
            for a, outboxes, inboxes in zip(self.seat_of, self.outboxes, self.inboxes, strict=True)
        ]
        return Program(
            seats=self.seats,
            tables=[tables[seat.pipeline, seat.stage] for seat in self.seats],
            reduces_at=[reduces_at[seat.pipeline, seat.stage] for seat in self.seats],
            actors=actors,
            seat_of=self.seat_of,
            actor_of=self.actor_of,
            groups=groups,
            reductions=taken,
            begin_s=begin_s,
            norm_s=norm_s,
            exchange_s=_exchange_s(self.plan, self.cluster),
            update_s=update_s,
        )

    def _stage(self, seat: Seat) -> Stage:
        return self.plan.pipelines[seat.pipeline].stages[seat.stage]

    # seconds

    def _times(self, seat: Seat) -> list[list[Time]]:
        """Returns the times of each ministage, by slice; where a seat's ranks differ, the slowest
        counts.
        """
        tp = self._stage(seat).tp
        if self._stage(seat).ep > 1:
            return self._together(seat)
        parts = frozenset((i // tp, self.links[rank]) for i, rank in enumerate(seat.ranks))
        key = seat.pipeline, seat.stage, self._stage(seat).replicas[seat.replica].kind, parts
        if key not in self.known_times:
            self.known_times[key] = self._make_times(seat, parts)
        return self.known_times[key]

    def _make_times(self, seat: Seat, parts: frozenset[tuple[int, GroupLinks]]) -> list[list[Time]]:
        """Returns the times of a seat's ministages.

        parts: the context-parallel index of each of its ranks, with the links that the rank has.
        The exchange in each layer joins context-parallel ranks, so that of them the slowest counts.
        """
        firsts = seat.ranks[:: self._stage(seat).tp]  # of each part
        return [
            [
                slowest(times)
                for times in zip(
                    *(self._part_times(firsts[cp_index], span, link) for cp_index, link in parts),
                    strict=True,
                )
            ]
            for span in self.layers[seat.pipeline][seat.stage]
        ]

    def _part_times(
        self, rank: int, layers: tuple[int, int], links: GroupLinks, twice_the_rows: bool = False
    ) -> list[Time]:
        """Returns the times of layers [first, last) on a rank's chip, for its part of sequences,
        by slice.
        """
        return span_times(
            self.plan, self.cluster, rank, layers, links, self.emulated, twice_the_rows
        )

    def _together(self, seat: Seat) -> list[list[Time]]:
        """Returns the times of a seat's ministages where experts lie over the stage's ranks.

        Rows go to experts and come back in every layer: the slowest rank's attention and the
        slowest rank's experts count, one after the other, for all.
        """
        stage, key = self._stage(seat), (seat.pipeline, seat.stage)
        if key not in self.known_times:
            ranks = {
                (stage_shape(self.plan, rank), self.links[rank], self.plan.chip(rank)): rank
                for rank in (group[0] for group in stage.groups)
            }.values()  # one of those that are alike
            self.known_times[key] = []
            for span in self.layers[seat.pipeline][seat.stage]:
                times, twice = (
                    [
                        time
                        for rank in ranks
                        for time in self._part_times(rank, span, self.links[rank], more)
                    ]
                    for more in (False, True)
                )
                self.known_times[key].append([joined(times, twice, span[1] - span[0])])
        return self.known_times[key]

    def _seconds(self, a: int) -> list[float]:
        """Returns the seconds of a seat's slots: every kind of WORKS for each ministage, by
        slice.
        """
        seat = self.seats[a]
        gathers_s = [self._gather_s(seat, n) for n in lengths(self.plan, seat.pipeline)]
        seconds: list[float] = []
        pairs = [p for times in self.times[a] for p in zip(times, gathers_s, strict=True)]
        for time, gather_s in pairs:
            # the way to the host and back goes on beside the work, and counts where it is longer
            late_s = time.fetch_s - time.recompute_s
            of = {
                Kind.F: max(time.forward_s, time.store_s),
                Kind.R: time.recompute_s,
                Kind.B: max(time.backward_s, late_s),
                Kind.I: max(time.backward_input_s, late_s),
                Kind.W: time.backward_weight_s,
            }
            seconds += [of[kind] * self.slowdown[a] if kind in of else gather_s for kind in WORKS]
        return seconds

    def _gather_s(self, seat: Seat, length: int) -> float:
        """Returns the seconds to pass a boundary tensor on to the tensor-parallel group.

        That begins once the tensor has arrived, and the group's slowest rank counts. length: of the
        sequences in it.
        """
        stage = self._stage(seat)
        place = stage, seat.replica
        groups = (group_boxes(*place, cp_index, length) for cp_index in range(stage.cp))
        size = max(sum(box.size for box in boxes) for boxes in groups) * self._row_bytes
        return max(
            gather_boundary_s(size, stage.tp, inside, self.plan.resharding)
            for inside in {self.links[rank].inside for rank in seat.ranks}
        )

    @property
    def _row_bytes(self) -> int:
        return self.plan.model.hidden * self.plan.model.dtype_bytes

    # messages

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
        first, others = self.first_seats[one], self.first_seats[other]
        joint = boundary(sender, receiver, length, self.plan.resharding)
        for r, ways in enumerate(joint.ways):
            a = self.actor_of[first + r]
            if self.seat_of[a] != first + r:
                continue
            for _, destination, source, way in sorted(self._ranks_of(ways, first + r, others)):
                b = self.actor_of[others + way.receiver]
                latency_s, pipes = self._way(source, destination, way.rows * self._row_bytes)
                into = inbox + way.into
                self.outboxes[a][outbox + way.turn].append(Transmission(b, into, latency_s, pipes))
                self.inboxes[b][into].append(a)

    def _ranks_of(
        self, ways: Sequence[Way], sender: int, receivers: int
    ) -> Iterator[tuple[int, int, int, Way]]:
        """Yields ways in the order of rows and receiving ranks, with their ranks.

        sender: a seat. receivers: the first seat of their stage.
        """
        ranks = self.seats[sender].ranks
        for way in ways:
            destination = self.seats[receivers + way.receiver].ranks[way.destination]
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


@lru_cache(maxsize=4096)
def _ops(key: TableKey, turns: tuple[tuple[tuple[Kind, int], int], ...]) -> list[Op]:
    """Returns an op for each action but the last, the step, with the slots that _Compiler fills."""
    slots: dict[tuple[Kind, int], tuple[int, int]] = {}
    boxes, turns_of = key.parts * key.slices, dict(turns)
    for k in range(key.ministages):
        for i, kind in enumerate(WORKS):
            slots[kind, k] = WORK, k * key.slices * len(WORKS) + i
        slots[Kind.SEND_ACTIVATION, k] = SEND, boxes * k
        slots[Kind.RECV_ACTIVATION, k] = RECV, boxes * k
        slots[Kind.SEND_GRADIENT, k] = SEND, boxes * (key.ministages + k)
        slots[Kind.RECV_GRADIENT, k] = RECV, boxes * (key.ministages + k)
        slots[Kind.REDUCE, k] = MARK, k
    ops = []
    for action in table_of(key)[:-1]:
        name = action.kind, action.ministage
        (code, slot), i = slots[name], action.micro_batch or 0
        if code == WORK:
            ops.append((code, slot + i % key.slices * len(WORKS), i))
            continue
        many = turns_of.get(name, 1)
        ops.append((code, slot + i % many, i // many))
    return ops


def boxes_of(pipeline: Pipeline, stage: int) -> int:
    """Returns how many boxes each way of a ministage's messages has, at most."""
    return pipeline.parts(stage) * pipeline.slices


def _exchange_s(plan: Plan, cluster: Cluster) -> float:
    """Returns the seconds in which all ranks exchange each parameter's norm, and the loss."""
    norms = sum(parameter.trains for parameter in plan.model.all_parameters)
    row_bytes = max(4, plan.model.dtype_bytes) * (norms + 1)
    everyone = tuple(range(plan.world_size))
    link = slowest_link(cluster, 0, everyone)
    return all_gather_s(row_bytes * plan.world_size, plan.world_size, link)
