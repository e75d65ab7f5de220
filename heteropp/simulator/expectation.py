"""What a simulated step leads a training rank to expect of its own, to compare what it measures."""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property, lru_cache
from pathlib import Path

from heteropp.description.cluster import read_cluster
from heteropp.description.plan import Plan
from heteropp.description.profile import ProfileError, measured_cluster, read_profile
from heteropp.description.timeline import Span
from heteropp.description.used_chips import used_cluster
from heteropp.schedule.action import Kind
from heteropp.schedule.step_times import LinkTimes
from heteropp.simulator.engine import Actor
from heteropp.simulator.simulate import Simulation, simulate
from heteropp.simulator.wiring import boxes_of


class ExpectedStep:
    """A simulated step, by rank."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.step_s = simulation.step_s
        self.replicas = [seat.ranks for seat in simulation.program.seats]  # each one's ranks

    @cached_property
    def work_s(self) -> list[float]:
        """Seconds that each rank works, by rank."""
        work_s = [0.0] * self._simulation.plan.world_size
        for ranks, share in zip(self.replicas, self._simulation.shares, strict=True):
            for rank in ranks:
                work_s[rank] = share.work * self.step_s
        return work_s

    @property
    def spans(self) -> list[Span]:
        """Every action of every rank."""
        return self._simulation.spans

    @property
    def memory(self) -> dict[int, list[tuple[float, int]]]:
        """(Seconds, bytes held from then on) of each replica's fullest rank, by that rank."""
        found, replicas = self._simulation, range(len(self.replicas))
        return {found.fullest_rank(a): found.memory_of(a).points() for a in replicas}

    def links_of(self, rank: int) -> LinkTimes:
        return links_of(self._simulation, rank)


@lru_cache(maxsize=2)  # of a process: the plan that runs, and the one that may follow
def expected_step(plan: Plan, cluster: Path, profile: Path | None = None) -> ExpectedStep | None:
    """Returns what to expect, or None where the profile measured no such stage.

    profile: of the cluster's chips; absent, their files say how fast they are. Raises FileError
    where one of the files cannot be read.
    """
    machines = used_cluster(plan, read_cluster(cluster))
    if profile is not None:
        machines = measured_cluster(machines, read_profile(profile))
    try:
        return ExpectedStep(simulate(plan, machines, emulated=True))
    except ProfileError:
        return None


def links_of(simulation: Simulation, rank: int) -> LinkTimes:
    """Returns the seconds that the simulator expects of a rank's messages and reductions."""
    program = simulation.program
    a, seat = next((a, seat) for a, seat in enumerate(program.seats) if rank in seat.ranks)
    pipeline = simulation.plan.pipelines[seat.pipeline]
    ministages, boxes = pipeline.stages[seat.stage].ministages, boxes_of(pipeline, seat.stage)
    messages_s: dict[tuple[Kind, int], float] = {}
    for inbox, seconds in _messages(program.actors, program.actor_of[a]).items():
        slot = inbox // boxes  # of activations by ministage, then of gradients
        kind = Kind.RECV_ACTIVATION if slot < ministages else Kind.RECV_GRADIENT
        name = kind, slot % ministages
        messages_s[name] = max(seconds, messages_s.get(name, 0.0))  # of the longest slice
    taken = {g for groups in program.reductions[a] for g in groups}
    reductions_s = sum(program.groups[g].seconds for g in taken)
    return LinkTimes(messages_s, reductions_s, program.exchange_s)


def _messages(actors: list[Actor], receiver: int) -> dict[int, float]:
    """Returns the seconds of the slowest message to each inbox of an actor."""
    slowest_s: dict[int, float] = defaultdict(float)
    for actor in actors:
        for delivery in (d for outbox in actor.boxes.outboxes for d in outbox):
            if delivery.receiver == receiver:
                seconds = delivery.latency_s + max((s for _, s in delivery.pipes), default=0.0)
                slowest_s[delivery.inbox] = max(slowest_s[delivery.inbox], seconds)
    return slowest_s
