"""How a rank's step divides into work, communication and bubble, from when its actions ran.

The words are those of schedule/step_times.py. A rank that waits cannot see why; of a wait, what
the links need counts as communication, and the rest as bubble: someone was late.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from heteropp.schedule.action import COMPUTATION, GATHERS, Action, Kind
from heteropp.schedule.step_times import LinkTimes, TimeShare

Ran = tuple[Action, float, float]  # when it began and ended, seconds


@dataclass(frozen=True)
class StepEnds:
    """When the parts of a STEP ended: seconds."""

    reduced_s: float  # the last reduction had come
    normed_s: float  # this rank's norms were computed
    exchanged_s: float  # everyone's were here


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
