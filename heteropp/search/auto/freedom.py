"""What a request leaves open to the default planner, and what it may choose there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from heteropp.description.plan import Plan, Schedule, Stage, ZeroStage
from heteropp.description.profile import chip_profile
from heteropp.description.schedules import SLICING
from heteropp.search.auto.busy import with_layers
from heteropp.search.parts import most_expert_ranks, numbers_of_parts, numbers_of_slices
from heteropp.search.planner import Request
from heteropp.search.tables import SCHEDULES

EVERY_SCHEDULE: tuple[Schedule, ...] = (
    "1f1b",
    "zb-h1",
    "gpipe",
    "interleaved-1f1b",
    "zb-v",
    "chimera",
)
EVERY_ZERO: tuple[ZeroStage, ...] = (0, 1, 2)
MOST_SIZES = 4  # of a replica's part of a micro-batch, each twice the one before
LONG = 16_384  # tokens, from which on it is tried to cut sequences that fit whole, too
USUAL_PARTS = 8  # of a sequence, at most, where the request does not say it
USUAL_EXPERT_RANKS = 64  # over which experts lie, at most, where the request does not say it


@dataclass(frozen=True)
class Freedom:
    """What plans for a request may be like."""

    request: Request
    cuts_short: bool = False  # whether sequences may be cut that are not long
    spreads: bool = False  # whether experts may lie over ranks though nobody asked for it

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        return EVERY_SCHEDULE if "schedule" in self.request.open else (self.request.schedule,)

    @property
    def zero_stages(self) -> tuple[ZeroStage, ...]:
        return EVERY_ZERO if "zero_stage" in self.request.open else (self.request.zero_stage,)

    @property
    def sequences_open(self) -> bool:
        return "sequences" in self.request.open

    @property
    def sizes(self) -> list[int]:
        """The sequences of a micro-batch in each replica that plans begin with."""
        if not self.sequences_open:
            return [self.request.sequences]
        batch = self.request.global_batch
        return [1 << n for n in range(MOST_SIZES) if batch % (1 << n) == 0]

    @property
    def chain_schedule(self) -> Schedule:
        """The schedule under which pipelines are sought, before they take another."""
        first = self.schedules[0]
        return first if first in SCHEDULES else "1f1b"

    @cached_property
    def measured(self) -> bool:
        """Whether some chip has a profile, which knows neither sequence nor context parallelism,
        nor selective recompute.
        """
        cluster = self.request.cluster
        return any(chip_profile(cluster, name) for name in cluster.chip_names())

    @cached_property
    def sequence_parallel(self) -> tuple[bool, ...]:
        """Whether stages may cut rows over tensor-parallel ranks."""
        refused = self.request.model.sequence_parallel_problem() is not None
        return (False,) if refused or self.measured else (False, True)

    @cached_property
    def context_parallel(self) -> tuple[int, ...]:
        """The degrees that stages may have: numbers of parts that sequences are cut into."""
        most = self.request.context_parallel
        if most is None:
            most = USUAL_PARTS if self._cuts else 1
        return numbers_of_parts(self.request, most)

    @cached_property
    def token_slices(self) -> tuple[int, ...]:
        """The numbers of slices into which pipelines may cut sequences."""
        most = self.request.token_slices
        kept_whole = most is None and (not self._cuts or self.request.context_parallel == 1)
        if kept_whole or not set(self.schedules) & set(SLICING):
            return (1,)
        return numbers_of_slices(self.request, most)

    @property
    def _cuts(self) -> bool:
        """Whether sequences may be cut though nobody asked for it."""
        return self.cuts_short or self.request.model.sequence_length >= LONG

    @cached_property
    def expert_parallel(self) -> int:
        """The most ranks over which the experts of a layer may lie; 1: each rank has them all."""
        most = self.request.expert_parallel
        if most is None:  # each way to spread them takes traces of its own
            most = USUAL_EXPERT_RANKS if self.spreads else 1
        return most_expert_ranks(self.request, most)

    @cached_property
    def selective_recompute(self) -> bool:
        refused = self.request.model.selective_recompute_problem() is not None
        return not refused and not self.measured

    def allows(self, plan: Plan) -> bool:
        """Whether a plan keeps to what the request says."""
        if plan.schedule not in self.schedules or plan.zero_stage not in self.zero_stages:
            return False
        stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
        if any(stage.tp > min(map(self._tp_limits.__getitem__, stage.chips)) for stage in stages):
            return False
        if self.sequences_open:
            return True
        own = self.request.sequences
        return all(
            replica.batch_share >= own and replica.batch_share % own == 0
            for stage in stages
            for replica in stage.replicas
        )

    @cached_property
    def _tp_limits(self) -> dict[str, int]:
        """The most ranks of a tensor-parallel group, by chip."""
        return {node.chip_name: node.chip.tp_limit for node in self.request.cluster.nodes}


def as_schedule(plan: Plan, schedule: Schedule, ministages: int) -> Plan | None:
    """Returns a plan under another schedule. Stages with fewer layers than ministages take some
    from the longest stages. Sequences that the schedule cannot run in slices become whole. Returns
    None where the model has too few layers, or Chimera would get an odd number of stages.

    ministages: of each stage, where the schedule interleaves them.
    """
    count = {"1f1b": 1, "zb-h1": 1, "zb-v": 2, "chimera": 2}.get(schedule, ministages)

    def changed(stage: Stage) -> Stage:
        return replace(stage, ministages=count, offload=stage.offload and count > 1)

    pipelines = []
    for pipeline in plan.pipelines:
        stages = pipeline.stages
        if schedule == "chimera":  # its ministages hold the layers of two stages
            if len(stages) % 2:
                return None
        elif plan.model.layers < count * len(stages):
            return None
        else:
            stages = _with_at_least(count, stages)
        token_slices = pipeline.token_slices if schedule in SLICING else None
        stages = tuple(map(changed, stages))
        pipelines.append(replace(pipeline, stages=stages, token_slices=token_slices))
    return replace(plan, schedule=schedule, pipelines=tuple(pipelines))


def _with_at_least(layers: int, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Returns stages of at least so many layers each, taken from the longest stages."""
    counts = [stage.layer_count for stage in stages]
    while min(counts) < layers:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(min(counts))] += 1
    return with_layers(stages, counts)
