"""Memory of a rank over a step: what its actions hold, in the terms of the cost model.

Parameters, gradients, optimizer state and buffers stay; a forward adds what it keeps, a backward
frees it when its W has ended; whatever computes also needs its working set.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace

from heteropp.action import Action, Kind
from heteropp.cluster import Cluster
from heteropp.memory import Memory, put_off_share, stage_memory, update_bytes
from heteropp.plan import Plan, ministage_layers
from heteropp.planned import stage_shape
from heteropp.profile import chip_profile
from heteropp.schedule import in_flight

MANY = 1 << 20  # micro-batches in flight: so many that the update has no part in the peak
WORKING = frozenset({Kind.F, Kind.R, Kind.B, Kind.I, Kind.W})


@dataclass(frozen=True)
class MemoryCurve:
    """bytes[i] are held from times_s[i] to times_s[i + 1], during actions[i] or after it."""

    times_s: list[float]
    bytes: list[int]
    actions: list[Action]

    @property
    def peak_bytes(self) -> int:
        return max(self.bytes)

    def at(self, time_s: float) -> int:
        return self.bytes[max(bisect_right(self.times_s, time_s) - 1, 0)]

    def points(self) -> list[tuple[float, int]]:
        return list(zip(self.times_s, self.bytes, strict=True))

    def first_over(self, capacity_bytes: int) -> tuple[float, int, Action] | None:
        """When a capacity is first exceeded, what is needed then, and by which action."""
        for time_s, size, action in zip(self.times_s, self.bytes, self.actions, strict=True):
            if size > capacity_bytes:
                return time_s, size, action
        return None


def memory_curve(
    plan: Plan, cluster: Cluster, rank: int, rows: Iterable[tuple[Action, float, float]]
) -> MemoryCurve:
    """Of one rank; `rows` are its actions, each with its begin and end in seconds."""
    p, s, r, _ = plan.place(rank)
    pipeline = plan.pipelines[p]
    layers = [last - first for first, last in ministage_layers(pipeline, plan.schedule)[s]]
    shape = stage_shape(plan, rank)
    profile = chip_profile(cluster, pipeline.stages[s].replicas[r].chip)

    count = pipeline.micro_batches * pipeline.parts(s)

    def with_in_flight(held: float, offload: bool = False) -> Memory:
        wanted = replace(shape, offload=offload)
        return stage_memory(plan.model, wanted, held, count, profile)

    share = put_off_share(plan.model, shape, profile)
    most = with_in_flight(in_flight(plan.schedule, pipeline, s, share), shape.offload)
    constant = most.total - most.working - most.kept
    whole = with_in_flight(2).kept - with_in_flight(1).kept  # of a micro-batch, by all layers
    own = whole - with_in_flight(1).kept  # of what is at work, which the working set counts
    working = with_in_flight(MANY).working
    updating = update_bytes(plan.model, shape, count, profile) - most.boundary
    sizes = [whole * count / sum(layers) for count in layers]
    held = late = 0.0
    times, sizes_now, actions = [0.0], [constant], [Action(Kind.F, 0)]

    def note(time_s: float, kept: float, also: int, action: Action) -> None:
        times.append(time_s)
        sizes_now.append(constant + round(min(kept, own) if shape.offload else kept) + also)
        actions.append(action)

    for action, start_s, end_s in rows:
        if action.kind == Kind.STEP:
            note(start_s, 0, max(0, updating), action)
            note(end_s, 0, 0, action)
        if action.kind not in WORKING:
            continue
        size = sizes[action.ministage]
        if action.kind == Kind.F:
            held += size
        elif action.kind == Kind.W:
            late -= share * size
        note(start_s, held + late - own, working, action)
        if action.kind == Kind.I:
            late += share * size
        elif action.kind in (Kind.B, Kind.W):
            held -= size
        note(end_s, held + late, 0, action)
    return MemoryCurve(times, sizes_now, actions)
