"""Runs a plan's actions on predicted times, event by event, without chips.

Every replica works through the actions that the executor would run (schedule/). What a message,
a pipe and a reduction do is said in engine.py and reductions.py. Sends do not hold the sender, and
receives are posted ahead, unless simulate() is given a slack.

The step is one of many alike: the ranks come out of the exchange of norms of the step before at
one moment, and each begins when its own update has ended. So the time from a rank's begin to its
end is the same for all ranks, and is the time of a step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import add, mul

from heteropp.cost.capacity import host_overrun, lacking_host
from heteropp.cost.planned import human_bytes, rank_share, spread_of
from heteropp.description.cluster import Cluster
from heteropp.description.plan import Plan, Stage
from heteropp.description.timeline import Span, in_words
from heteropp.optimizer.replicated_gradients import exchanges
from heteropp.schedule.action import COMPUTATION, GATHERS, Action, Kind
from heteropp.schedule.step_times import TimeShare
from heteropp.simulator.engine import Noise, StuckError, Timing, play
from heteropp.simulator.memory_curve import MemoryCurve, memory_curve
from heteropp.simulator.program import Program, compile_plan
from heteropp.simulator.reductions import settle


class DeadlockError(RuntimeError):
    """No rank can go on; the message names what each waits for."""


@dataclass(frozen=True)
class Simulation:
    """A simulated step of a plan on a cluster: its timeline, and what follows from it."""

    plan: Plan
    cluster: Cluster
    step_s: float
    program: Program
    timing: Timing  # by seat

    @property
    def tokens_per_s(self) -> float:
        """The tokens that the whole job trains on in a second."""
        return self.plan.global_batch * self.plan.model.sequence_length / self.step_s

    @property
    def tokens_per_chip_per_s(self) -> float:
        """TGS of section 6.2."""
        return self.tokens_per_s / self.plan.world_size

    @cached_property
    def spans(self) -> list[Span]:
        """Every action of every rank, by rank and time."""
        seats = sorted((rank, a) for a, s in enumerate(self.program.seats) for rank in s.ranks)
        result: list[Span] = []
        for rank, a in seats:
            result += [replace(span, rank=rank) for span in self.spans_of(a)]
        return result

    def spans_of(self, a: int) -> list[Span]:
        """Every action of a replica, by time, as of its first rank."""
        rank = self.program.seats[a].ranks[0]
        spans = [
            Span(rank, x.kind, x.micro_batch, start_s, end_s, x.ministage)
            for x, start_s, end_s in self._rows(a)
        ]
        return sorted(spans, key=lambda span: (span.start_s, span.end_s))

    @cached_property
    def shares(self) -> list[TimeShare]:
        """How the step divides for each replica, in the order of program.seats."""
        known: dict[Hashable, TimeShare] = {}
        program, timing = self.program, self.timing
        result = []
        for a, table in enumerate(program.tables):
            lists = id(table), id(timing.starts[a]), id(timing.ends[a])
            own_s = program.norm_s[a], program.update_s[a], program.begin_s[a]
            reduced_s = self._reduce_s(a)
            key = *lists, *own_s, reduced_s, timing.message_s[a]
            if key not in known:
                known[key] = self._share(a, reduced_s)
            result.append(known[key])
        return result

    @cached_property
    def stage_shares(self) -> dict[tuple[int, int], TimeShare]:
        """How the step divides on average over a stage's replicas, by (pipeline, stage)."""
        found: dict[tuple[int, int], list[TimeShare]] = {}
        for seat, share in zip(self.program.seats, self.shares, strict=True):
            found.setdefault((seat.pipeline, seat.stage), []).append(share)
        return {
            place: TimeShare(
                sum(s.work for s in shares) / len(shares),
                sum(s.communication for s in shares) / len(shares),
                sum(s.bubble for s in shares) / len(shares),
            )
            for place, shares in found.items()
        }

    @property
    def bubble(self) -> float:
        """The bubble of the mean chip."""
        sizes = [len(seat.ranks) for seat in self.program.seats]
        return sum(map(mul, sizes, (s.bubble for s in self.shares))) / sum(sizes)

    def memory_of(self, a: int) -> MemoryCurve:
        """Bytes over time of a replica's fullest rank."""
        return self._curve(a, self._fullest(a))

    def fullest_rank(self, a: int) -> int:
        """Returns the first of a replica's ranks that need the largest share of their memory."""
        return self._first_rank(a, self._fullest(a))

    def capacity_bytes(self, a: int) -> int:
        """The memory of that rank's chip."""
        return self.cluster.chip(self.fullest_rank(a)).memory.capacity_bytes

    def _fullest(self, a: int) -> int:
        """Returns the context-parallel index of those ranks."""
        degree = self._stage(a).cp

        def filled(cp_index: int) -> float:
            chip = self.cluster.chip(self._first_rank(a, cp_index))
            return self._curve(a, cp_index).peak_bytes / chip.memory.capacity_bytes

        return max(range(degree), key=filled) if degree > 1 else 0

    def _curve(self, a: int, cp_index: int) -> MemoryCurve:
        key = a, cp_index
        if key not in self._curves:
            rank = self._first_rank(*key)
            self._curves[key] = memory_curve(self.plan, self.cluster, rank, self._rows(a))
        return self._curves[key]

    def _first_rank(self, a: int, cp_index: int) -> int:
        return self.program.seats[a].ranks[cp_index * self._stage(a).tp]

    def _stage(self, a: int) -> Stage:
        seat = self.program.seats[a]
        return self.plan.pipelines[seat.pipeline].stages[seat.stage]

    @cached_property
    def memory_bytes(self) -> list[int]:
        """The peak bytes of each rank."""
        peaks = {
            rank: self._curve(b, i // self._stage(a).tp).peak_bytes
            for a, b in enumerate(self._alike)
            for i, rank in enumerate(self.program.seats[a].ranks)
        }
        return [peaks[rank] for rank in range(self.plan.world_size)]

    def overruns(self) -> list[str]:
        """A sentence for each stage, or kind of chip in it, that needs too much, and for a host."""
        result = []
        for a in sorted(set(self._alike)):
            seat = self.program.seats[a]
            capacity = self.capacity_bytes(a)
            over = self.memory_of(a).first_over(capacity)
            if over is None:
                continue
            when_s, need, action = over
            slices = self.plan.pipelines[seat.pipeline].slices
            result.append(
                f"stage {seat.stage} of pipeline {seat.pipeline} needs {human_bytes(need)} on rank "
                f"{self.fullest_rank(a)} at {describe(action, slices)}, {when_s:.4g} s "
                "into the step; the chip "
                f"has {human_bytes(capacity)}"
            )
        if host := lacking_host(self.plan, self.cluster):
            result.append(host_overrun(host))
        return result

    @cached_property
    def _alike(self) -> list[int]:
        """The first replica, for each one, whose ranks hold as much memory.

        Their peaks are equal, even if they do not come at the same time.
        """
        first: dict[Hashable, int] = {}
        result = []
        plan, copies = self.plan, exchanges(self.plan)
        for a, seat in enumerate(self.program.seats):
            stage = self._stage(a)
            kind = stage.replicas[seat.replica].kind
            experts = tuple(spread_of(plan, rank) for rank in seat.ranks)
            own = tuple(rank_share(plan, rank, stage.ministages, copies) for rank in seat.ranks)
            result.append(first.setdefault((seat.pipeline, seat.stage, kind, experts, own), a))
        return result

    @cached_property
    def _curves(self) -> dict[tuple[int, int], MemoryCurve]:
        return {}

    def _rows(self, a: int) -> Iterator[tuple[Action, float, float]]:
        """A replica's actions, when each began, and when it ended."""
        table, timing = self.program.tables[a], self.timing
        return zip(table, timing.starts[a], timing.ends[a], strict=True)

    def _reduce_s(self, a: int) -> float:
        program = self.program
        return sum(program.groups[g].seconds for taken in program.reductions[a] for g in taken)

    def _share(self, a: int, reduce_s: float) -> TimeShare:
        program = self.program
        work_s, gather_s, exposed_s = program.norm_s[a] + program.update_s[a], 0.0, 0.0
        clock_s = program.begin_s[a]
        for action, start_s, end_s in self._rows(a):
            if action.kind in COMPUTATION:
                work_s += end_s - start_s
            elif action.kind in GATHERS:
                gather_s += end_s - start_s
            elif action.kind == Kind.STEP:
                exposed_s = start_s - clock_s
            if action.kind != Kind.REDUCE:
                clock_s = end_s
        communication_s = (
            gather_s + self.timing.message_s[a] + min(exposed_s, reduce_s) + self.program.exchange_s
        )
        work, communication = work_s / self.step_s, communication_s / self.step_s
        return TimeShare(work, communication, max(0.0, 1 - work - communication))


def simulate(
    plan: Plan,
    cluster: Cluster,
    *,
    emulated: bool = False,
    slack: int | None = None,
    noise: float = 0.0,
    seed: int = 0,
    slowdown: Mapping[int, float] | None = None,
    message_factor: float = 1.0,
    whole_backwards: bool = False,
) -> Simulation:
    """One step. Raises DeadlockError when the action tables cannot finish.

    emulated: messages as emulated chips pace them, every pair of ranks apart, at Cluster.link();
    otherwise they share the pipes of Cluster.route(). slack: of a transport that posts no receives
    ahead, how many tensors may wait in a send until the receiver comes to their receive, before the
    sender waits too (0: nothing is buffered); messages begin then. None: receives are posted ahead,
    and messages begin when they are sent. Only plans with overlap are played with slack.
    noise: sigma of the log-normal factor on the seconds of each piece of work. slowdown: by rank,
    a factor on all its work. message_factor: on the seconds of every message between stages, as
    of a transport that is so many times slower. whole_backwards: 1F1B as published, whose gradient
    of the input waits for those of the weights. Of a plan without overlap a send holds its rank
    until the messages have arrived, and a recompute waits for its gradient (Table 9, "w/o
    fine-grained overlap").
    """
    program = compile_plan(
        *(plan, cluster, emulated, slowdown or {}, message_factor, whole_backwards),
        fold=not noise,
    )
    luck = Noise(noise, seed) if noise else None
    try:
        played = play(program.actors, slack, luck, hold=not plan.overlap)
    except StuckError as error:
        raise DeadlockError(_deadlock(plan, program, error)) from None
    timing = Timing(
        starts=[played.starts[a] for a in program.actor_of],
        ends=[played.ends[a] for a in program.actor_of],
        message_s=[played.message_s[a] for a in program.actor_of],
    )
    reduced_s = _reduced(program, timing)
    begin_s = [
        max([ends[-1], *(end_s for _, end_s in own)])
        for ends, own in zip(timing.ends, reduced_s, strict=True)
    ]
    met_s = max(map(add, begin_s, program.norm_s)) + program.exchange_s
    end_s = [met_s + update_s for update_s in program.update_s]
    # a replica began as long after the first as its update is longer than the shortest
    whole = _with_step(timing, reduced_s, begin_s, end_s)
    return Simulation(plan, cluster, met_s + min(program.update_s), program, whole)


def _reduced(program: Program, timing: Timing) -> list[list[tuple[int, float]]]:
    """Returns, by seat, when its reductions end, each with the place in its table."""
    taken = [
        [(i, group) for k, i in places.items() for group in by_ministage[k]]
        for places, by_ministage in zip(program.reduces_at, program.reductions, strict=True)
    ]
    wanted = [[(group, timing.starts[a][i]) for i, group in own] for a, own in enumerate(taken)]
    return [
        [(i, end_s) for (i, _), end_s in zip(own, ends, strict=True)]
        for own, ends in zip(taken, settle(program.groups, wanted), strict=True)
    ]


def _with_step(
    timing: Timing,
    reduced_s: Sequence[Sequence[tuple[int, float]]],
    begin_s: Sequence[float],
    end_s: Sequence[float],
) -> Timing:
    """Returns a timing with the ends of reductions, and the optimizer's step, which comes last.

    Replicas that do the same go on sharing their lists: those of all would take gigabytes.
    """
    known: dict[Hashable, tuple[list[float], list[float]]] = {}
    whole = Timing([], [], timing.message_s)
    for a, (starts, ends) in enumerate(zip(timing.starts, timing.ends, strict=True)):
        key = id(starts), id(ends), tuple(reduced_s[a]), begin_s[a], end_s[a]
        if key not in known:
            own = [*ends, end_s[a]]
            for i, reduced_at_s in reduced_s[a]:
                own[i] = reduced_at_s
            known[key] = [*starts, begin_s[a]], own
        starts, ends = known[key]
        whole.starts.append(starts)
        whole.ends.append(ends)
    return whole


def describe(action: Action, slices: int) -> str:
    """Returns an action in words, such as "F of micro-batch 3". slices: of its pipeline."""
    if action.micro_batch is None:
        return str(action.kind)
    ministage = f", ministage {action.ministage}" if action.ministage else ""
    return f"{action.kind} of micro-batch {in_words(action.micro_batch, slices)}{ministage}"


def _deadlock(plan: Plan, program: Program, error: StuckError) -> str:
    """Names the ring of replicas that wait for each other, or all that wait."""
    stuck = {s.actor: s for s in error.stuck}
    seen: list[int] = []
    a = next(iter(stuck))
    while a in stuck and a not in seen:
        seen.append(a)
        a = next((b for b in stuck[a].waits_for if b in stuck), -1)
    ring = seen[seen.index(a) :] if a in seen else seen

    def rank(b: int) -> str:
        return f"rank {program.seats[program.seat_of[b]].ranks[0]}"

    parts = []
    for b in ring:
        others = stuck[b].waits_for
        whom = " for " + ", ".join(map(rank, others[:3])) if others else ", and no one sends it"
        seat = program.seat_of[b]
        action, pipeline = program.tables[seat][stuck[b].op], program.seats[seat].pipeline
        doing = describe(action, plan.pipelines[pipeline].slices)
        parts.append(f"{rank(b)} at {doing} waits{whom}")
    return f"the schedule cannot go on: {'; '.join(parts)}"
