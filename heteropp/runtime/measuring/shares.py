"""How a rank's step divides into work, communication and bubble, from when its actions ran.

The words are the simulator's (simulate.Share). A rank that waits cannot see why; of a wait, what
the links need counts as communication, and the rest as bubble: someone was late.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from heteropp.schedule.action import Action, Kind
from heteropp.simulator.engine import Actor
from heteropp.simulator.simulate import COMPUTATION, GATHERS, Simulation, TimeShare

Ran = tuple[Action, float, float]  # when it began and ended, seconds


@dataclass(frozen=True)
class LinkTimes:
    """Seconds that a rank's messages and collectives take when no one is late.

    All zero where the links are not known: then every wait is bubble.
    """

    messages_s: Mapping[tuple[Kind, int], float] = field(default_factory=dict)  # by receive
    reductions_s: float = 0.0
    exchange_s: float = 0.0  # of the norms


@dataclass(frozen=True)
class StepEnds:
    """When the parts of a STEP ended: seconds."""

    reduced_s: float  # the last reduction had come
    normed_s: float  # this rank's norms were computed
    exchanged_s: float  # everyone's were here


def links_of(simulation: Simulation, rank: int) -> LinkTimes:
    """Returns the seconds that the simulator expects of a rank's messages and reductions."""
    program = simulation.program
    a, seat = next((a, seat) for a, seat in enumerate(program.seats) if rank in seat.ranks)
    pipeline = simulation.plan.pipelines[seat.pipeline]
    ministages, parts = pipeline.stages[seat.stage].ministages, pipeline.parts(seat.stage)
    messages_s: dict[tuple[Kind, int], float] = {}
    for inbox, seconds in _messages(program.actors, a).items():
        slot = inbox // parts  # of activations by ministage, then of gradients
        kind = Kind.RECV_ACTIVATION if slot < ministages else Kind.RECV_GRADIENT
        messages_s[kind, slot % ministages] = seconds
    taken = {g for groups in program.reductions[a] for g in groups}
    reductions_s = sum(program.groups[g].seconds for g in taken)
    return LinkTimes(messages_s, reductions_s, program.exchange_s)


def _messages(actors: list[Actor], receiver: int) -> dict[int, float]:
    """Returns the seconds of the slowest message to each inbox of an actor."""
    slowest_s: dict[int, float] = defaultdict(float)
    for actor in actors:
        for delivery in (d for outbox in actor.outboxes for d in outbox):
            if delivery.receiver == receiver:
                seconds = delivery.latency_s + max((s for _, s in delivery.pipes), default=0.0)
                slowest_s[delivery.inbox] = max(slowest_s[delivery.inbox], seconds)
    return slowest_s


def divide(ran: Iterable[Ran], step: StepEnds, links: LinkTimes) -> TimeShare:
    """Divides one rank's step into work, communication and bubble, as shares of its seconds.

    The step lasts from the begin of its first action to the end of its last.
    """
    ran = list(ran)
    start_s, end_s = ran[0][1], ran[-1][2]
    work_s = communication_s = 0.0
    for action, begin_s, done_s in ran:
        took_s = done_s - begin_s
        if action.kind in COMPUTATION:
            work_s += took_s
        elif action.kind in GATHERS or action.kind == Kind.SWITCH:
            communication_s += took_s
        elif action.kind in (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT):
            least_s = links.messages_s.get((action.kind, action.ministage), 0.0)
            communication_s += min(took_s, least_s)
        elif action.kind == Kind.STEP:
            work_s += step.normed_s - step.reduced_s + done_s - step.exchanged_s
            communication_s += min(step.reduced_s - begin_s, links.reductions_s)
            communication_s += min(step.exchanged_s - step.normed_s, links.exchange_s)
    whole_s = end_s - start_s
    work, communication = work_s / whole_s, communication_s / whole_s
    return TimeShare(work, communication, max(0.0, 1 - work - communication))
