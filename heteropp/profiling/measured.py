"""Measured runs as plans on clusters, and what is predicted of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from heteropp.cost.memory_walk import MemoryWalk
from heteropp.cost.planned import check_cluster, slowest_link, stage_shape
from heteropp.cost.stage_time import StageShape, stage_time
from heteropp.description.chips import ChipSpec
from heteropp.description.cluster import Cluster, Link, Node, in_order
from heteropp.description.measured import MeasuredBlock, MeasuredRuns, MeasuredStep
from heteropp.description.plan import Pipeline, Plan, PlanError, Replica, Stage, validate
from heteropp.schedule.stage_actions import coded_table, table_key
from heteropp.simulator.simulate import simulate

Chips = Mapping[str, ChipSpec]  # by the names that measured runs give


@dataclass(frozen=True)
class Point:
    """One measured figure, and what is predicted of it."""

    name: str
    what: str  # step, forward, backward or memory
    fit: bool
    doubt: str
    measured: float  # seconds or bytes
    predicted: float

    @property
    def error(self) -> float:
        """The prediction's relative error."""
        return self.predicted / self.measured - 1


def predict_times(file: MeasuredRuns, chips: Chips, fitted_alone: bool = False) -> list[Point]:
    """Returns the seconds of every block and step, or of those that are for fitting."""
    result = []
    for block in file.blocks:
        if block.fit or not fitted_alone:
            predicted = block_s(file, block, chips)
            for what, seconds in zip(("forward", "backward"), predicted, strict=True):
                measured = getattr(block, f"{what}_s")
                result.append(Point(block.name, what, block.fit, "", measured, seconds))
    for run in file.runs:
        if run.fit or not fitted_alone:
            seconds = step_s(file, run, chips)
            result.append(Point(run.name, "step", run.fit, run.doubt, run.step_s, seconds))
    return result


def predict_memory(file: MeasuredRuns, chips: Chips) -> list[Point]:
    """Returns the most bytes of a rank, of every run that says them."""
    return [
        Point(run.name, "memory", False, run.doubt, run.memory_bytes, most_bytes(file, run, chips))
        for run in file.runs
        if run.memory_bytes is not None
    ]


def most_bytes(file: MeasuredRuns, run: MeasuredStep, chips: Chips) -> int:
    """Returns the most bytes that a rank of a run needs, as the software there keeps them."""
    plan, _ = planned(file, run, chips)
    pipeline = plan.pipelines[0]
    most = 0
    for s, stage in enumerate(pipeline.stages):
        rank = stage.replicas[0].ranks[0]
        shape = replace(
            stage_shape(plan, rank),
            in_place_update=file.in_place_update,
            gathers_again=file.gathers_again,
        )
        key = table_key(plan.schedule, pipeline, s, plan.overlap, whole_backwards=True)
        most = max(most, MemoryWalk(plan, rank, shape, coded_table(key)).peak().total)
    return most


def step_s(file: MeasuredRuns, run: MeasuredStep, chips: Chips) -> float:
    """Returns the simulated seconds of a step, whose backwards are not cut in two."""
    plan, cluster = planned(file, run, chips)
    return simulate(plan, cluster, whole_backwards=True).step_s


def block_s(file: MeasuredRuns, block: MeasuredBlock, chips: Chips) -> tuple[float, float]:
    """Returns the predicted seconds of a block's forward and backward, collectives included.

    Raises PlanError where the block cannot be on its chip.
    """
    model = file.model(block.model)
    if problem := model.tp_problem(block.tp):
        raise PlanError(f"blocks {block.name!r}: {problem}")
    cluster = _cluster(file, f"blocks {block.name!r}", [(block.chip, block.tp)], chips)
    inside = slowest_link(cluster, 0, tuple(range(block.tp)))
    shape = StageShape(
        layers=1,
        first=False,
        last=False,
        tp=block.tp,
        dp=1,
        sequences=block.sequences,
        zero_stage=0,
        recompute=False,
        sequence_parallel=block.sequence_parallel,
        selective_recompute=block.selective_recompute,
    )
    one, two = (
        stage_time(model, replace(shape, layers=n), cluster.chip(0), inside, Link(0.0, 1.0))
        for n in (1, 2)
    )
    return two.forward_s - one.forward_s, two.backward_s - one.backward_s


def planned(file: MeasuredRuns, run: MeasuredStep, chips: Chips) -> tuple[Plan, Cluster]:
    """Returns a run's plan and cluster. Raises PlanError where the plan cannot be.

    Tensor-parallel groups stand in nodes that they fill as far as they can; a node's chips are of
    consecutive stages where a stage does not fill it.
    """
    groups = [chip for stage in run.replicas for chip in stage]
    where = f"runs {run.name!r}"
    cluster = _cluster(file, where, [(chip, run.tp) for chip in groups], chips)
    free = {name: cluster.ranks_of(name) for name in cluster.chip_names()}
    stages, first = [], 0
    for size, stage in zip(run.layers, run.replicas, strict=True):
        replicas = []
        for chip in stage:
            ranks, free[chip] = tuple(free[chip][: run.tp]), free[chip][run.tp :]
            replicas.append(Replica(ranks=ranks, chip=chip, batch_share=run.micro_batch))
        stages.append(
            Stage(
                layers=(first, first + size),
                recompute=run.recompute,
                replicas=tuple(replicas),
                ministages=run.ministages,
                sequence_parallel=run.sequence_parallel,
                selective_recompute=run.selective_recompute,
            )
        )
        first += size
    whole = run.micro_batch * len(run.replicas[0])
    plan = Plan(
        model=file.model(run.model),
        global_batch=run.global_batch,
        micro_batch=whole,
        schedule="interleaved-1f1b" if run.ministages > 1 else "1f1b",
        zero_stage=run.zero_stage,
        overlap=run.overlap,
        pipelines=(Pipeline(micro_batches=run.global_batch // whole, stages=tuple(stages)),),
    )
    try:
        validate(plan)
        check_cluster(plan, cluster)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from None
    return plan, cluster


def _cluster(
    file: MeasuredRuns, where: str, groups: list[tuple[str, int]], chips: Chips
) -> Cluster:
    """Returns the nodes that groups of (chip, ranks) fill.

    where: the measurement, for a sentence. Raises PlanError where a node is too small for a group.
    """
    for name, tp in groups:
        if tp > (most := chips[name].chips_per_node):
            raise PlanError(f"{where}: tp is {tp}; a node of chip {name} has {most} chips")
    return Cluster(file.name, in_order(_filled(file, groups, chips)))


def _filled(file: MeasuredRuns, groups: list[tuple[str, int]], chips: Chips) -> Iterator[Node]:
    """Yields the nodes that groups of (chip, ranks) fill, one after another."""
    for name in sorted({chip for chip, _ in groups}):
        chip = chips[name]
        if file.nic_bytes_per_s is not None:
            links = replace(chip.links, nic_bytes_per_s=file.nic_bytes_per_s)
            chip = replace(chip, links=links)
        ranks = sum(count for chip, count in groups if chip == name)
        tp = groups[0][1]
        most = chip.chips_per_node // tp * tp  # a group is never torn apart
        while ranks > 0:
            here = min(most, ranks)
            yield Node(name, chip, range(here))
            ranks -= here
