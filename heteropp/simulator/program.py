"""A plan on a cluster as actors for the engine: seconds, messages and who reduces with whom.

An actor is one replica of a stage, whose ranks work in step, and stands for all that do the same at
the same times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from heteropp.cost.communication import gather_boundary_s
from heteropp.cost.planned import slowest_link
from heteropp.cost.stage_time import all_gather_s
from heteropp.description.cluster import Cluster
from heteropp.description.plan import Plan, Stage
from heteropp.layout.resharding import group_boxes
from heteropp.schedule.action import Action, Kind
from heteropp.schedule.stage_actions import TableKey, reductions_in, table_key, table_of
from heteropp.simulator.engine import MARK, RECV, SEND, WORK, Actor, Op, Ops
from heteropp.simulator.gradients import reductions
from heteropp.simulator.placement import Seat, factor_of, lengths, placement
from heteropp.simulator.reductions import ReductionGroup
from heteropp.simulator.seat_times import SeatTimes
from heteropp.simulator.wiring import Turns, row_bytes, wiring

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
        self.plan, self.cluster = plan, cluster
        placed = placement(plan, cluster, emulated, slowdown, fold)
        self.seats, self.links = placed.seats, placed.links
        self.seat_of, self.actor_of = placed.seat_of, placed.actor_of
        times = SeatTimes(plan, cluster, placed.links, emulated)
        of_actors = [times.of(self.seats[a]) for a in self.seat_of]
        self.times = [of_actors[actor] for actor in self.actor_of]  # by seat
        self.slowdown = [factor_of(slowdown, seat) for seat in self.seats]
        self.wiring = wiring(plan, cluster, placed, emulated, message_factor)

    def program(self, whole_backwards: bool) -> Program:
        tables: dict[tuple[int, int], Sequence[Action]] = {}
        reduces_at: dict[tuple[int, int], Mapping[int, int]] = {}
        ops: dict[tuple[int, int], Ops] = {}
        for p, pipeline in enumerate(self.plan.pipelines):
            for s in range(len(pipeline.stages)):
                key = table_key(self.plan.schedule, pipeline, s, self.plan.overlap, whole_backwards)
                tables[p, s], reduces_at[p, s] = table_of(key), reductions_in(key)
                ops[p, s] = _ops(key, self.wiring.turns[p, s])
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
                boxes=boxes,
                begin_s=begin_s[a],
            )
            for a, boxes in zip(self.seat_of, self.wiring.boxes, strict=True)
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
        size = max(sum(box.size for box in boxes) for boxes in groups) * row_bytes(self.plan)
        return max(
            gather_boundary_s(size, stage.tp, inside, self.plan.resharding)
            for inside in {self.links[rank].inside for rank in seat.ranks}
        )


@lru_cache(maxsize=4096)
def _ops(key: TableKey, turns: Turns) -> Ops:
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
    ops: list[Op] = []
    for action in table_of(key)[:-1]:
        name = action.kind, action.ministage
        (code, slot), i = slots[name], action.micro_batch or 0
        if code == WORK:
            ops.append((code, slot + i % key.slices * len(WORKS), i))
            continue
        many = turns_of.get(name, 1)
        ops.append((code, slot + i % many, i // many))
    return Ops(ops)


def _exchange_s(plan: Plan, cluster: Cluster) -> float:
    """Returns the seconds in which all ranks exchange each parameter's norm, and the loss."""
    norms = sum(parameter.trains for parameter in plan.model.all_parameters)
    row_bytes = max(4, plan.model.dtype_bytes) * (norms + 1)
    everyone = tuple(range(plan.world_size))
    link = slowest_link(cluster, 0, everyone)
    return all_gather_s(row_bytes * plan.world_size, plan.world_size, link)
