"""Runs a plan's actions on predicted times, event by event, without chips.

Every rank works through the actions that the executor would run (schedule.py). A message departs
when its data is ready and the link from its sender to its receiver is free, and is delivered
after latency + bytes / bandwidth; sends do not hold the sender, receives are posted ahead.

The step is one of many alike: the ranks come out of the exchange of norms of the step before at
one moment, and each begins when its own update has ended. So the time from a rank's begin to its
end is the same for all ranks, and is the time of a step.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from heteropp.cluster import Cluster
from heteropp.cost import Time, all_gather_s
from heteropp.llama import model_parameters
from heteropp.plan import Plan, Stage
from heteropp.planned import rank_times, slowest_link
from heteropp.reshard import Message, messages, piece_box
from heteropp.schedule import Action, Kind, one_f_one_b
from heteropp.timeline import Span


class DeadlockError(RuntimeError):
    """No rank can go on; the message names what each waits for."""


@dataclass(frozen=True)
class Simulation:
    step_s: float
    spans: list[Span]
    busy_s: tuple[float, ...]  # by rank: computing, and reducing within its stage


def simulate(plan: Plan, cluster: Cluster) -> Simulation:
    """Raises DeadlockError when the action tables cannot finish."""
    times = rank_times(plan, cluster)
    run = _Run(plan, cluster, times)
    begin_s = run.clock[0]
    run.go()
    spans = sorted(run.spans, key=lambda s: (s.rank, s.start_s, s.end_s))
    busy_s = []
    for rank, time in enumerate(times):
        micro_batches = plan.pipelines[plan.place(rank)[0]].micro_batches
        busy_s.append(micro_batches * time.micro_batch_s + time.step_s)
    return Simulation(run.clock[0] - begin_s, spans, tuple(busy_s))


class _Run:
    def __init__(self, plan: Plan, cluster: Cluster, times: list[Time]) -> None:
        self.plan, self.cluster, self.times = plan, cluster, times
        first = min(time.update_s for time in times)
        self.clock = [time.update_s - first for time in times]
        self.next = [0] * plan.world_size
        self.spans: list[Span] = []
        self.link_free: dict[tuple[int, int], float] = defaultdict(float)
        # when the pieces that a rank receives for an action arrive
        self.arrivals: dict[tuple[int, Kind, int | None], list[float]] = defaultdict(list)
        self.groups: dict[tuple[int, Kind], tuple[tuple[int, ...], float]] = {}
        # when each rank of a group reached a collective
        self.joined: dict[tuple, dict[int, float]] = defaultdict(dict)
        self.everyone = tuple(range(plan.world_size))
        self.norms_s = _norms_s(plan, cluster)
        self.places = [plan.place(rank) for rank in range(plan.world_size)]
        self.actions: list[list[Action]] = []
        self.outgoing: dict[tuple[int, Kind], list[Message]] = defaultdict(list)
        self.incoming: dict[tuple[int, Kind], int] = defaultdict(int)
        for rank in range(plan.world_size):
            pipeline = plan.pipelines[self.places[rank][0]]
            self.actions.append(one_f_one_b(pipeline, self.places[rank][1]))
        for pipeline in plan.pipelines:
            for before, after in zip(pipeline.stages, pipeline.stages[1:], strict=False):
                self._boundary(before, after, Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION)
                self._boundary(after, before, Kind.SEND_GRADIENT, Kind.RECV_GRADIENT)

    def _boundary(self, sender: Stage, receiver: Stage, send: Kind, receive: Kind) -> None:
        for message in messages(sender, receiver, self.plan.model.sequence_length):
            self.outgoing[message.source, send].append(message)
            self.incoming[message.destination, receive] += 1

    def go(self) -> None:
        waiting = set(range(self.plan.world_size))
        while waiting:
            moved = False
            for rank in sorted(waiting):
                while self.next[rank] < len(self.actions[rank]) and self._advance(rank):
                    moved = True
                if self.next[rank] == len(self.actions[rank]):
                    waiting.discard(rank)
            if waiting and not moved:
                stuck = ", ".join(
                    f"rank {rank} at {_name(self.actions[rank][self.next[rank]])}"
                    for rank in sorted(waiting)
                )
                raise DeadlockError(f"the schedule cannot go on: {stuck}")

    def _advance(self, rank: int) -> bool:
        """Runs a rank's next action if it can run now."""
        action = self.actions[rank][self.next[rank]]
        end = self._end(rank, action)
        if end is None:
            return False
        self.spans.append(Span(rank, action.kind, action.micro_batch, self.clock[rank], end))
        self.clock[rank] = end
        self.next[rank] += 1
        return True

    def _end(self, rank: int, action: Action) -> float | None:
        now, times, kind = self.clock[rank], self.times[rank], action.kind
        if kind in (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT):
            arrivals = self.arrivals[rank, kind, action.micro_batch]
            if len(arrivals) < self.incoming[rank, kind]:
                return None
            return max(now, *arrivals)
        if kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT):
            self._send(rank, action, now)
            return now
        if kind == Kind.F:
            return now + times.forward_s
        if kind == Kind.R:
            return now + times.recompute_s
        if kind == Kind.B:
            return now + times.backward_s
        return self._collective(rank, action, now)

    def _send(self, rank: int, action: Action, now: float) -> None:
        receive = {
            Kind.SEND_ACTIVATION: Kind.RECV_ACTIVATION,
            Kind.SEND_GRADIENT: Kind.RECV_GRADIENT,
        }[action.kind]
        for message in self.outgoing[rank, action.kind]:
            link = self.cluster.link(rank, message.destination)
            size = message.box.shape[0] * self.plan.model.hidden * self.plan.model.dtype_bytes
            departure = max(now, self.link_free[rank, message.destination])
            self.link_free[rank, message.destination] = departure + size / link.bytes_per_s
            self.arrivals[message.destination, receive, action.micro_batch].append(
                departure + link.seconds(size)
            )

    def _collective(self, rank: int, action: Action, now: float) -> float | None:
        """Gathers, the reduction and the update: everyone of the group starts with the last."""
        times = self.times[rank]
        before_s = times.norm_s if action.kind == Kind.STEP else 0.0
        after_s = times.update_s if action.kind == Kind.STEP else 0.0
        if (rank, action.kind) not in self.groups:
            self.groups[rank, action.kind] = self._group(rank, action)
        group, exchange_s = self.groups[rank, action.kind]
        joined = self.joined[action, group]
        joined[rank] = now + before_s
        if len(joined) < len(group):
            return None
        return max(joined.values()) + exchange_s + after_s

    def _group(self, rank: int, action: Action) -> tuple[tuple[int, ...], float]:
        """Who takes part in a collective, and how long it takes them."""
        pipeline, stage_index, replica, tp_index = self.places[rank]
        stage = self.plan.pipelines[pipeline].stages[stage_index]
        if action.kind == Kind.REDUCE:
            return tuple(r.ranks[tp_index] for r in stage.replicas), self.times[rank].reduce_s
        if action.kind == Kind.STEP:  # the gradient's norm is the whole job's
            return self.everyone, self.norms_s
        ranks = stage.replicas[replica].ranks
        length = self.plan.model.sequence_length
        rows = piece_box(stage, replica, tp_index, length).shape[0] * len(ranks)
        size = rows * self.plan.model.hidden * self.plan.model.dtype_bytes
        return ranks, all_gather_s(size, len(ranks), slowest_link(self.cluster, rank, ranks))


def _norms_s(plan: Plan, cluster: Cluster) -> float:
    """Every rank gives every other the norm of each parameter of the model, and the loss."""
    row_bytes = max(4, plan.model.dtype_bytes) * (len(model_parameters(plan.model)) + 1)
    everyone = tuple(range(plan.world_size))
    link = slowest_link(cluster, 0, everyone)
    return all_gather_s(row_bytes * plan.world_size, plan.world_size, link)


def _name(action: Action) -> str:
    if action.micro_batch is None:
        return str(action.kind)
    return f"{action.kind} of micro-batch {action.micro_batch}"
