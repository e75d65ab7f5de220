"""AutoHet's planner: asymmetric pipelines over unlike chips (AutoHet, section III).

For each tensor-parallel degree, one for all chips: units of that many chips are divided into
device groups of equal effective power (equation 3, grouping.py), each of them a pipeline; units
are mapped to stages and nodes, the weakest chips to the first stages; and the layers are
partitioned in proportion to power within memory (equation 4). The plan of least time by
equation 1 wins.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from heteropp.cost.capacity import most_lacking
from heteropp.cost.communication import NO_LINK
from heteropp.cost.planned import slowest_link
from heteropp.cost.stage_time import StageShape, all_reduce_s, stage_memory, stage_time
from heteropp.description.chips import ChipSpec
from heteropp.description.plan import Pipeline, Plan, Replica, Stage
from heteropp.description.profile import ChipProfile, chip_profile
from heteropp.schedule.in_flight import in_flight
from heteropp.search.grouping import Grouping, UnitType, group_devices
from heteropp.search.planner import Candidate, Request, Result, SearchError, does_not_fit

MORE_MEMORY = 1.1  # what a grouping whose layers do not fit is asked for next


def search(request: Request) -> Result:
    """The best plan over all tensor-parallel degrees. Raises SearchError and DoesNotFitError."""
    if request.schedule != "1f1b":
        raise SearchError(f"autohet plans 1f1b; the schedule is {request.schedule}")
    if request.global_batch % request.sequences:
        raise SearchError(
            f"global batch {request.global_batch} is not a multiple of the "
            f"{request.sequences} sequences of a micro-batch"
        )
    found, failed, steps, notes = [], [], 0, []
    for tp in _tp_degrees(request):
        planned = _Degree(request, tp).plan()
        steps += planned.steps
        if planned.candidate:
            found.append(planned.candidate)
        else:
            too_long = planned.stages and not planned.nearest
            why = f"it takes {planned.stages} stages" if too_long else "its layers do not fit"
            notes.append(f"tensor-parallel degree {tp} is left out: {why}")
            failed.append(planned)
    if not found:
        raise _does_not_fit(request, failed)
    found.sort(key=lambda candidate: candidate.cost_s)
    # the heuristics of mapping and partition give no bound: the cost stands for itself
    return Result("autohet", found[0], found[1:], found[0].cost_s, steps, notes)


def _tp_degrees(request: Request) -> list[int]:
    """Powers of two that divide the chips of every node, and the model (getValidTpSize)."""
    nodes = request.cluster.nodes
    chips = math.gcd(*(len(node.ranks) for node in nodes))
    limit = min(node.chip.tp_limit for node in nodes)
    return [tp for tp in request.model.tp_degrees(limit) if chips % tp == 0]


def _does_not_fit(request: Request, failed: list[_Planned]) -> SearchError:
    plans = [planned.nearest for planned in failed if planned.nearest]
    stages = [planned.stages for planned in failed if planned.stages]
    if not plans and stages:
        return SearchError(
            f"autohet needs a pipeline of at least {min(stages)} stages on cluster "
            f"{request.cluster.name}; model {request.model.name} has {request.model.layers} layers"
        )
    if not plans:
        return SearchError(
            f"all memory of cluster {request.cluster.name} does not hold model "
            f"{request.model.name} once; autohet plans neither offload nor recompute beyond that"
        )

    nearest = min(plans, key=lambda plan: most_lacking(plan, request.cluster))
    return does_not_fit(nearest, request.cluster)


@dataclass(frozen=True)
class _Unit:
    """A tensor-parallel group of one chip type."""

    chip: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class _Planned:
    candidate: Candidate | None
    nearest: Plan | None  # one that does not fit
    steps: int
    stages: int = 0  # of the longest pipeline of the first grouping; 0: there is none


class _Degree:
    """The search with one tensor-parallel degree."""

    def __init__(self, request: Request, tp: int) -> None:
        self.request, self.tp = request, tp
        self.cluster, self.model = request.cluster, request.model
        self.slots = request.global_batch // request.sequences
        self.units: dict[str, list[_Unit]] = {}
        for node in self.cluster.nodes:
            units = self.units.setdefault(node.chip_name, [])
            for first in range(node.ranks.start, node.ranks.stop, tp):
                units.append(_Unit(node.chip_name, tuple(range(first, first + tp))))
        # weakest first: the order of stages
        self.chips = sorted(self.units, key=lambda chip: (self._layers_per_s(chip), chip))

    def plan(self) -> _Planned:
        steps, nearest, stages = 0, None, 0
        memory_bytes = self._least_memory_bytes()
        while (grouping := self._group(memory_bytes)) is not None:
            steps += grouping.steps
            pipelines = self._map(grouping)
            stages = stages or max(map(len, pipelines))
            for recompute in (False, True):
                plan, fits = self._partition(pipelines, recompute)
                nearest = nearest or plan
                if plan and fits:
                    return _Planned(Candidate(plan, self.cost_s(plan)), None, steps)
            memory_bytes *= MORE_MEMORY
        return _Planned(None, nearest, steps, stages)

    def _group(self, least_memory_bytes: float) -> Grouping | None:
        types = []
        for chip in self.chips:
            memory_bytes = self.tp * self.chip(self.units[chip][0]).memory.capacity_bytes
            types.append(UnitType(len(self.units[chip]), self._layers_per_s(chip), memory_bytes))
        return group_devices(types, least_memory_bytes, self.slots)

    def _map(self, grouping: Grouping) -> list[list[_Unit]]:
        """The units of each pipeline's stages, weakest chips first.

        The units that come k-th of their chip in every pipeline are neighbours, as far as nodes
        allow, since replicas of a layer exchange gradients.
        """
        pipelines: list[list[_Unit]] = [[] for _ in grouping.groups]
        for index, chip in enumerate(self.chips):
            units = iter(self.units[chip])
            held = [group[index] for group in grouping.groups]
            for turn in range(max(held)):
                for pipeline, count in zip(pipelines, held, strict=True):
                    if turn < count:
                        pipeline.append(next(units))
        return pipelines

    def _partition(self, pipelines: list[list[_Unit]], recompute: bool) -> tuple[Plan | None, bool]:
        """Returns a plan over these units, or None where stages outnumber layers.

        The second value says whether the plan fits in memory.
        """
        if max(len(units) for units in pipelines) > self.model.layers:
            return None, False
        micro_batches = self.slots // len(pipelines)
        alike = len({tuple(unit.chip for unit in units) for units in pipelines}) == 1
        copies = 1 if alike else len(pipelines)  # alike, they become the replicas of one
        stages, fits = [], True
        for units in pipelines:
            layers, fit = _Partition(self, units, micro_batches, recompute, copies).run()
            stages.append(self._stages(units, layers, recompute))
            fits = fits and fit
        return self._plan(stages, micro_batches), fits

    def _stages(self, units: list[_Unit], layers: list[int], recompute: bool) -> list[Stage]:
        bounds = [0, *itertools.accumulate(layers)]
        share = self.request.sequences
        return [
            Stage(
                layers=span,
                recompute=recompute,
                replicas=(Replica(ranks=unit.ranks, chip=unit.chip, batch_share=share),),
            )
            for unit, span in zip(units, itertools.pairwise(bounds), strict=True)
        ]

    def _plan(self, pipelines: list[list[Stage]], micro_batches: int) -> Plan:
        """Returns the plan of these pipelines; if all are alike, they become replicas of one."""
        request = self.request
        if all(_outline(stages) == _outline(pipelines[0]) for stages in pipelines):
            together = [_together(replicas) for replicas in zip(*pipelines, strict=True)]
            pipelines = [together]
        return Plan(
            model=self.model,
            global_batch=request.global_batch,
            micro_batch=request.sequences * len(pipelines[0][0].replicas),
            schedule="1f1b",
            optimizer=request.optimizer,
            zero_stage=1 if request.zero_stage and len(pipelines) == 1 else 0,
            pipelines=tuple(
                Pipeline(micro_batches=micro_batches, stages=tuple(stages)) for stages in pipelines
            ),
        )

    def cost_s(self, plan: Plan) -> float:
        """Returns a step's seconds by equation 1, over the pipelines of the plan."""
        slowest_s = 0.0
        for pipeline in plan.pipelines:
            last = len(pipeline.stages) - 1
            times = []
            for s, stage in enumerate(pipeline.stages):
                unit = _Unit(stage.replicas[0].chip, stage.replicas[0].ranks)
                shape = self.shape(stage.layer_count, s == 0, s == last, stage.recompute)
                times.append(self.micro_batch_s(unit, shape))
            slowest_s = max(slowest_s, sum(times) + (pipeline.micro_batches - 1) * max(times))
        return slowest_s + self._sync_s(plan)

    def _sync_s(self, plan: Plan) -> float:
        """Returns the seconds to all-reduce the gradients of the stage with the most of them.

        The all-reduce runs at the slowest link between the pipelines.
        """
        copies = len(plan.pipelines) * plan.pipelines[0].stages[0].dp
        if copies == 1:
            return 0.0
        largest = max(
            self._gradient_bytes(pipeline, s)
            for pipeline in plan.pipelines
            for s in range(len(pipeline.stages))
        )
        firsts = [
            replica.ranks[0]
            for pipeline in plan.pipelines
            for stage in pipeline.stages
            for replica in stage.replicas
        ]
        link = slowest_link(self.cluster, firsts[0], tuple(firsts))
        return all_reduce_s(largest, copies, link)

    def _gradient_bytes(self, pipeline: Pipeline, s: int) -> int:
        """Returns the bytes of gradients that a rank of stage `s` holds."""
        stage, last = pipeline.stages[s], len(pipeline.stages) - 1
        shape = self.shape(stage.layer_count, s == 0, s == last, stage.recompute)
        return stage_memory(self.model, shape, 1, 1).gradients

    def micro_batch_s(self, unit: _Unit, shape: StageShape) -> float:
        inside = slowest_link(self.cluster, unit.ranks[0], unit.ranks)
        profile = self.profile(unit)
        return stage_time(
            self.model, shape, self.chip(unit), inside, NO_LINK, profile
        ).micro_batch_s

    def shape(self, layers: int, first: bool, last: bool, recompute: bool) -> StageShape:
        return StageShape(
            layers=layers,
            first=first,
            last=last,
            tp=self.tp,
            dp=1,
            sequences=self.request.sequences,
            zero_stage=0,
            optimizer=self.request.optimizer,
            recompute=recompute,
        )

    def chip(self, unit: _Unit) -> ChipSpec:
        return self.cluster.chip(unit.ranks[0])

    def profile(self, unit: _Unit) -> ChipProfile | None:
        return chip_profile(self.cluster, unit.chip)

    def _layers_per_s(self, chip: str) -> float:
        """Returns the computing power g of a unit, in layers per second for one micro-batch."""
        return 1 / self.micro_batch_s(self.units[chip][0], self.shape(1, False, False, False))

    def _least_memory_bytes(self) -> float:
        """Returns MIN_mem, the bytes that hold the model once with one micro-batch in flight."""
        shape = self.shape(self.model.layers, True, True, True)
        return self.tp * stage_memory(self.model, shape, 1, 1).total


class _Partition:
    """Equation 4 for one pipeline: the least time of the slowest stage, within memory, exactly."""

    def __init__(
        self,
        degree: _Degree,
        units: list[_Unit],
        micro_batches: int,
        recompute: bool,
        copies: int,
    ) -> None:
        """copies: the number of pipelines that hold the model."""
        self.degree, self.units, self.recompute = degree, units, recompute
        self.micro_batches = micro_batches
        self.copies = copies
        stage = Stage(layers=(0, 1), recompute=recompute, replicas=())
        self.pipeline = Pipeline(micro_batches=micro_batches, stages=(stage,) * len(units))

    def run(self) -> tuple[list[int], bool]:
        """Returns the layers of each stage, and whether they fit in memory."""
        total = self.degree.model.layers
        most = total - len(self.units) + 1
        caps = [self._most_that_fit(s, most) for s in range(len(self.units))]
        fits = all(caps) and sum(caps) >= total
        if not fits:
            caps = [most] * len(self.units)
        times = [self._times(s, cap) for s, cap in enumerate(caps)]
        layers = [1] * len(self.units)
        # one layer after another to where it delays least; exact, since times grow with layers
        for _ in range(total - len(self.units)):
            open_stages = (s for s in range(len(layers)) if layers[s] < caps[s])
            chosen = min(open_stages, key=lambda s: (times[s][layers[s]], s))
            layers[chosen] += 1
        return layers, fits

    def _times(self, s: int, most: int) -> list[float]:
        """Seconds of a micro-batch with 1, 2, ... layers."""
        return [
            self.degree.micro_batch_s(self.units[s], self._shape(s, layers))
            for layers in range(1, most + 1)
        ]

    def _shape(self, s: int, layers: int) -> StageShape:
        return self.degree.shape(layers, s == 0, s == len(self.units) - 1, self.recompute)

    def _most_that_fit(self, s: int, most: int) -> int:
        capacity = self.degree.chip(self.units[s]).memory.capacity_bytes
        profile = self.degree.profile(self.units[s])
        held = in_flight("1f1b", self.pipeline, s)

        def fits(layers: int) -> bool:
            shape = replace(self._shape(s, layers), copies=self.copies)
            need = stage_memory(self.degree.model, shape, held, self.micro_batches, profile)
            return need.total <= capacity

        low, high = 0, most  # the need grows with the layers
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low


def _outline(stages: list[Stage]) -> list[tuple]:
    return [(stage.layers, stage.replicas[0].chip) for stage in stages]


def _together(stages: tuple[Stage, ...]) -> Stage:
    replicas = sorted(
        (replica for stage in stages for replica in stage.replicas), key=lambda r: r.ranks
    )
    return replace(stages[0], replicas=tuple(replicas))
