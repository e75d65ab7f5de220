"""Zorse's planner: pipelines over groups of unlike nodes, with ZeRO-2 inside (section 4.3).

Phase 1 divides the cluster's nodes into groups (node_groups.py). Phase 2 configures each division:
layers in proportion to the groups' speed, groups in order of falling bandwidth inside, and every
micro-batch size and number of ministages; each chip is a replica that takes its share of every
micro-batch. The configuration of least latency within memory wins.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from heteropp.cost.capacity import lacking_bytes
from heteropp.cost.communication import NO_LINK
from heteropp.cost.planned import slowest_links
from heteropp.cost.stage_time import StageShape, Time, all_gather_s, stage_memory, stage_time
from heteropp.description.chips import ChipSpec
from heteropp.description.cluster import Link, Node
from heteropp.description.plan import Pipeline, Plan, Replica, Stage, ZeroStage
from heteropp.description.profile import chip_profile
from heteropp.search.node_groups import Division, NodeGroups
from heteropp.search.planner import Candidate, Request, Result, SearchError, does_not_fit

RUNNERS_UP = 3
ZERO_STAGE: ZeroStage = 2


def search(request: Request) -> Result:
    """The best plan over all divisions. Raises SearchError and DoesNotFitError."""
    node_groups = NodeGroups(request.cluster)
    configured, steps = [], 0
    for division in node_groups.divisions():
        groups = [_Group(request, nodes) for nodes in node_groups.nodes(division)]
        if len(groups) > request.model.layers:
            continue
        groups.sort(key=lambda group: (-group.link.bytes_per_s, group.ranks))
        for micro_batch in _micro_batches(request.global_batch, groups):
            found = _Division(request, division, groups, micro_batch).configurations()
            steps += len(found)
            configured += found
    if not configured:
        raise SearchError(
            f"global batch {request.global_batch} has no divisor that gives each chip of a group a "
            f"sequence of every micro-batch; the smallest group has "
            f"{min(len(node.ranks) for node in request.cluster.nodes)} chips"
        )
    nearest = min(configured, key=lambda c: (c.overrun_bytes, c.key))
    # what is estimated of a stage is not yet what its ranks come to hold
    likely = sorted((c for c in configured if not c.overrun_bytes), key=lambda c: c.key)
    chosen: dict[Division, _Configuration] = {}  # the best of each division
    least: tuple[int, int] | None = None
    for configuration in likely or [nearest]:
        if len(chosen) > RUNNERS_UP:
            break
        if configuration.division in chosen:
            continue
        lacking = lacking_bytes(configuration.plan(request), request.cluster)
        if lacking == (0, 0):
            chosen[configuration.division] = configuration
        elif least is None or lacking < least:
            least, nearest = lacking, configuration
    if not chosen:
        raise does_not_fit(nearest.plan(request), request.cluster)
    best, *others = (Candidate(c.plan(request), c.latency_s) for c in chosen.values())
    # heuristics choose layers and order: the cost stands for itself
    return Result("zorse", best, others, best.cost_s, steps)


def _micro_batches(global_batch: int, groups: list[_Group]) -> list[int]:
    """Returns the micro-batch sizes that give every chip of every group at least one sequence."""
    least = max(len(group.ranks) for group in groups)
    return [size for size in range(least, global_batch + 1) if global_batch % size == 0]


class _Group:
    """The chips that hold a stage together, each a replica."""

    def __init__(self, request: Request, nodes: list[Node]) -> None:
        self.request = request
        self.nodes = nodes
        self.ranks = [rank for node in nodes for rank in node.ranks]

    @cached_property
    def link(self) -> Link:
        """The slowest link inside the group, which sets the speed of its collectives."""
        links = slowest_links(self.request.cluster, self.ranks).values()
        return min(links, key=lambda link: link.bytes_per_s)

    @cached_property
    def kinds(self) -> list[tuple[str, ChipSpec, int]]:
        """The chip types inside, with how many there are of each."""
        found: dict[str, tuple[ChipSpec, int]] = {}
        for node in self.nodes:
            chip, count = found.get(node.chip_name, (node.chip, 0))
            found[node.chip_name] = (chip, count + len(node.ranks))
        return [(name, chip, count) for name, (chip, count) in found.items()]

    def time(
        self, name: str, chip: ChipSpec, layers: int, place: tuple[bool, bool], share: int
    ) -> Time:
        shape = self.shape(layers, place, share, 1)
        profile = chip_profile(self.request.cluster, name)
        return stage_time(self.request.model, shape, chip, NO_LINK, self.link, profile)

    def shape(
        self, layers: int, place: tuple[bool, bool], share: int, ministages: int
    ) -> StageShape:
        """Activations are checkpointed after each layer (section 4.1.3): recompute, and offload."""
        return StageShape(
            layers=layers,
            first=place[0],
            last=place[1],
            tp=1,
            dp=len(self.ranks),
            sequences=share,
            zero_stage=ZERO_STAGE,
            optimizer=self.request.optimizer,
            recompute=True,
            ministages=ministages,
            offload=True,
            schedule="gpipe",
        )

    def shares(self, micro_batch: int) -> dict[str, list[int]]:
        """Returns the sequences of a micro-batch that each chip takes, by chip type, most last.

        Each further sequence goes to the chip that ends earliest with it, so to all chips of a
        type before another type has its turn.
        """
        per_sequence = {
            name: self.time(name, chip, 1, (False, False), 1).micro_batch_s
            for name, chip, _ in self.kinds
        }
        counts = {name: count for name, _, count in self.kinds}
        levels = dict.fromkeys(counts, 1)  # that all chips of a type have
        left = micro_batch - len(self.ranks)
        while True:
            name = min(levels, key=lambda name: (levels[name] + 1) * per_sequence[name])
            if left < counts[name]:  # so many of its chips take one more
                break
            levels[name] += 1
            left -= counts[name]
        return {
            chip: [levels[chip]] * (counts[chip] - more) + [levels[chip] + 1] * more
            for chip, more in ((chip, left if chip == name else 0) for chip in counts)
        }


@dataclass(frozen=True)
class _Stage:
    """A group with its layers, for one micro-batch size."""

    group: _Group
    layers: int
    shares: dict[str, list[int]]  # by chip type
    forward_s: float  # of a micro-batch, the slowest replica's
    backward_s: float  # recompute included
    update_s: float
    parameter_bytes: float  # of all its layers
    gradient_bytes: float


class _Division:
    """Phase 2 for one division and micro-batch size (section 4.3.3)."""

    def __init__(
        self, request: Request, division: Division, groups: list[_Group], micro_batch: int
    ) -> None:
        self.request, self.division, self.groups = request, division, groups
        self.micro_batch = micro_batch
        self.micro_batches = request.global_batch // micro_batch
        self.shares = [group.shares(micro_batch) for group in groups]

    def configurations(self) -> list[_Configuration]:
        stages = [self._stage(index, layers) for index, layers in enumerate(self._layers())]
        most = min(stage.layers for stage in stages)
        return [
            _Configuration(
                self.division,
                tuple(stages),
                self.micro_batch,
                ministages,
                self._latency_s(stages, ministages),
                self._overrun_bytes(stages, ministages),
            )
            for ministages in range(1, most + 1)
        ]

    def _layers(self) -> list[int]:
        """Returns the layers of each group, in proportion to its speed.

        Each further layer goes to the group that ends earliest with it.
        """
        last = len(self.groups) - 1
        rates = []
        for index in range(len(self.groups)):
            place = (index == 0, index == last)
            one, two = self._micro_batch_s(index, 1, place), self._micro_batch_s(index, 2, place)
            rates.append((one, two - one))
        layers = [1] * len(self.groups)
        for _ in range(self.request.model.layers - len(layers)):
            earliest = min(
                range(len(layers)), key=lambda i: (rates[i][0] + layers[i] * rates[i][1], i)
            )
            layers[earliest] += 1
        return layers

    def _micro_batch_s(self, index: int, layers: int, place: tuple[bool, bool]) -> float:
        group = self.groups[index]
        return max(
            group.time(name, chip, layers, place, max(self.shares[index][name])).micro_batch_s
            for name, chip, _ in group.kinds
        )

    def _stage(self, index: int, layers: int) -> _Stage:
        group, model = self.groups[index], self.request.model
        place = (index == 0, index == len(self.groups) - 1)
        times = [
            group.time(name, chip, layers, place, max(self.shares[index][name]))
            for name, chip, _ in group.kinds
        ]
        whole = group.shape(layers, place, 1, 1)
        memory = stage_memory(model, whole, 1, 1)
        return _Stage(
            group,
            layers,
            self.shares[index],
            max(time.forward_s for time in times),
            max(time.recompute_s + time.backward_s for time in times),
            max(time.norm_s + time.update_s for time in times),
            memory.parameters,
            memory.gradients,
        )

    def _latency_s(self, stages: Sequence[_Stage], ministages: int) -> float:
        """Returns a step's seconds (equation 1): start, all ministages' passes in turn, and end.

        All micro-batches pass a ministage before the next; its parameters are gathered, and its
        gradients scattered, while the ministage before it computes.
        """
        m = self.micro_batches
        gathers = [_gather_s(stage, stage.parameter_bytes / ministages) for stage in stages]
        scatters = [_gather_s(stage, stage.gradient_bytes / ministages) for stage in stages]
        sends = self._sends_s(stages, ministages)
        forwards = [stage.forward_s / ministages for stage in stages]
        backwards = [stage.backward_s / ministages for stage in stages]

        def turn_s(works: list[float], messages: list[float]) -> float:
            """Returns the seconds from one ministage's begin to the next's on the first group."""
            busy = max(max(m * w, c) for w, c in zip(works, messages, strict=True))
            return max(busy, m * max(sends, default=0.0), sum(works) + sum(sends))

        forward_s = ministages * turn_s(forwards, gathers) + sum(forwards) - max(forwards)
        both = [a + b for a, b in zip(gathers, scatters, strict=True)]
        backward_s = ministages * turn_s(backwards, both) + sum(backwards) - max(backwards)
        start_s = gathers[0] + 2 * sum(sends)
        end_s = max(
            stage.update_s / ministages + scatter
            for stage, scatter in zip(stages, scatters, strict=True)
        )
        return start_s + forward_s + backward_s + end_s

    def _sends_s(self, stages: Sequence[_Stage], ministages: int) -> list[float]:
        """Returns the seconds that a micro-batch takes over each boundary, one way.

        The chips of the smaller group each send or receive an equal part at the same time.

        With several ministages the last group sends back to the first.
        """
        model, cluster = self.request.model, self.request.cluster
        whole = self.micro_batch * model.sequence_length * model.hidden * model.dtype_bytes
        boundaries = list(itertools.pairwise(stages))
        if ministages > 1 and len(stages) > 1:
            boundaries.append((stages[-1], stages[0]))
        result = []
        for a, b in boundaries:
            link = cluster.link(a.group.ranks[0], b.group.ranks[0])
            side_by_side = min(len(a.group.ranks), len(b.group.ranks))
            result.append(link.seconds(whole / side_by_side))
        return result

    def _overrun_bytes(self, stages: Sequence[_Stage], ministages: int) -> int:
        """Returns the most bytes that any chip lacks; 0 where all have enough."""
        held = float(self.micro_batches)  # GPipe holds all
        worst = 0
        for s, stage in enumerate(stages):
            place = (s == 0, s == len(stages) - 1)
            for name, chip, _ in stage.group.kinds:
                share = max(stage.shares[name])
                shape = stage.group.shape(stage.layers, place, share, ministages)
                profile = chip_profile(self.request.cluster, name)
                need = stage_memory(self.request.model, shape, held, self.micro_batches, profile)
                worst = max(worst, need.total - chip.memory.capacity_bytes)
        return worst


def _gather_s(stage: _Stage, size_bytes: float) -> float:
    return all_gather_s(size_bytes, len(stage.group.ranks), stage.group.link)


@dataclass(frozen=True)
class _Configuration:
    division: Division
    stages: tuple[_Stage, ...]
    micro_batch: int
    ministages: int
    latency_s: float
    overrun_bytes: int

    @property
    def key(self) -> tuple:
        return (self.latency_s, self.ministages, len(self.stages), self.micro_batch)

    def plan(self, request: Request) -> Plan:
        count = request.global_batch // self.micro_batch
        return Plan(
            model=request.model,
            global_batch=request.global_batch,
            micro_batch=self.micro_batch,
            schedule="gpipe",
            zero_stage=ZERO_STAGE,
            optimizer=request.optimizer,
            pipelines=(_pipeline(self.stages, count, self.ministages),),
        )


def _pipeline(stages: Sequence[_Stage], micro_batches: int, ministages: int) -> Pipeline:
    bounds = [0, *itertools.accumulate(stage.layers for stage in stages)]
    return Pipeline(
        micro_batches=micro_batches,
        stages=tuple(
            Stage(
                layers=span,
                recompute=True,
                replicas=_replicas(stage),
                ministages=ministages,
                offload=True,
            )
            for stage, span in zip(stages, itertools.pairwise(bounds), strict=True)
        ),
    )


def _replicas(stage: _Stage) -> tuple[Replica, ...]:
    shares = {name: iter(sorted(shares)) for name, shares in stage.shares.items()}
    return tuple(
        Replica(ranks=(rank,), chip=node.chip_name, batch_share=next(shares[node.chip_name]))
        for node in stage.group.nodes
        for rank in node.ranks
    )
