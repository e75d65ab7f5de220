"""The times of ranks that wait for each other in every layer, taken together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from heteropp.cost.stage_time import Time


def slowest(times: Sequence[Time]) -> Time:
    """Returns the times of ranks that have parts of the same sequences.

    A later rank begins the second layer as late as the first one's messages were, beyond what held
    their sender, and stays so far behind.
    """
    if len(times) == 1:
        return times[0]
    forward_s = max(time.forward_behind_s for time in times)
    backward_s = max(time.backward_behind_s for time in times)
    return _longest(
        [
            _waiting(
                time,
                max(0.0, forward_s - time.forward_held_s),
                max(0.0, backward_s - time.backward_held_s),
            )
            for time in times
        ]
    )


def _longest(times: Sequence[Time]) -> Time:
    return Time(**{f.name: max(getattr(time, f.name) for time in times) for f in fields(Time)})


def _waiting(time: Time, forward_s: float, backward_s: float) -> Time:
    """Returns the time of a rank that waits so much longer in a forward, and in a backward."""
    return replace(
        time,
        forward_s=time.forward_s + forward_s,
        forward_collective_s=time.forward_collective_s + forward_s,
        recompute_s=time.recompute_s and time.recompute_s + forward_s,
        backward_s=time.backward_s + backward_s,
        backward_collective_s=time.backward_collective_s + backward_s,
        backward_input_s=time.backward_input_s + backward_s,
    )


def joined(times: list[Time], with_twice_the_rows: list[Time], layers: int) -> Time:
    """Returns the times of ranks that wait for each other before and behind every layer's experts.

    What computing takes longer with twice the rows is what the experts' products take. Those that
    have parts of sequences begin each of the layers together.
    """
    times, with_twice_the_rows = (
        [_waiting(t, layers * t.forward_behind_s, layers * t.backward_behind_s) for t in each]
        for each in (times, with_twice_the_rows)
    )
    most = _longest(times)

    def slowest_s(name: str, message_s: str) -> float:
        rest_s, experts_s = [], []
        for time, more in zip(times, with_twice_the_rows, strict=True):
            computing_s, more_s = (
                getattr(each, name) - getattr(each, message_s) for each in (time, more)
            )
            # none of a stage that its host holds up, which has longer messages to hide behind
            experts_s.append(max(0.0, more_s - computing_s))
            rest_s.append(computing_s - experts_s[-1])
        return max(rest_s) + max(experts_s) + getattr(most, message_s)

    forward_s = slowest_s("forward_s", "forward_collective_s")
    input_s = slowest_s("backward_input_s", "backward_collective_s")
    hidden_s = min(t.backward_input_s + t.backward_weight_s - t.backward_s for t in times)
    recompute_s = slowest_s("recompute_s", "forward_collective_s") if most.recompute_s else 0.0
    return replace(
        most,
        forward_s=forward_s,
        recompute_s=recompute_s,
        backward_input_s=input_s,
        backward_s=input_s + most.backward_weight_s - hidden_s,
    )
