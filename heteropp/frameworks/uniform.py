"""A plan for frameworks whose stages all have the same degrees: tp and dp of the whole job."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from heteropp.description.outline import together
from heteropp.description.plan import Pipeline, Plan, Stage, ministage_layers
from heteropp.description.schedules import Schedule
from heteropp.frameworks.file import ExportError, Replacement, spans
from heteropp.frameworks.one_pipeline import divided, sequence_parallel, single_pipeline

Recompute = Literal["full", "selective"]


@dataclass(frozen=True, kw_only=True)
class UniformJob:
    """A job whose stages all have `dp` replicas of `tp` ranks."""

    tp: int
    dp: int
    ranks: tuple[tuple[str, tuple[int, ...]], ...]  # of each stage, its chips and the plan's ranks
    chunks: tuple[tuple[int, int], ...]  # layers [first, last), in the order of the model
    schedule: Schedule
    micro_batch: int  # sequences of a replica
    global_batch: int  # sequences
    recompute: Recompute | None
    sequence_parallel: bool
    replacements: tuple[Replacement, ...]

    @property
    def pp(self) -> int:
        """The number of stages."""
        return len(self.ranks)

    @property
    def micro_batches(self) -> int:
        """The number of a step's micro-batches in each replica."""
        return self.global_batch // (self.micro_batch * self.dp)


def uniform(plan: Plan, schedules: dict[Schedule, str]) -> UniformJob:
    """Returns the plan with the same degrees for every stage.

    schedules: those that the framework has, with its own names. Where stages have unlike numbers
    of chips, each is cut into several that have as many as their greatest common divisor, so that
    every chip keeps layers that its type got. Raises ExportError.
    """
    single = single_pipeline(plan)
    found = list(single.replacements)
    stages = single.stages
    chips = together(chip for stage in stages for chip in stage.chips)
    if " + " in chips:
        found.append(
            Replacement(
                f"chips of several types ({chips})",
                "one device type: its kernels and its collectives have to run on all of them",
            )
        )
    world = math.gcd(*(stage.dp * stage.tp for stage in stages))
    tp = max((s.tp for s in stages if not world % s.tp), default=math.gcd(world, stages[0].tp))
    tp = tp if not plan.model.tp_problem(tp) else 1
    dp = world // tp
    cut = [stage.dp * stage.tp // world for stage in stages]
    if too_long := [s for s, n in enumerate(cut) if n > stages[s].layer_count]:
        s = too_long[0]
        raise ExportError(
            f"stage {s} has {stages[s].dp * stages[s].tp} chips for {stages[s].layer_count} layers "
            f"and the smallest common part of all stages is {world} chips; expected a plan with "
            "stages of more equal numbers of chips, such as heteropp-search --planner uniform finds"
        )
    _note_degrees(stages, tp, dp, cut, found)
    schedule, chunks = _chunks(plan, stages, cut, schedules, found)
    micro_batch, global_batch = _batches(plan, stages, dp, found)
    return UniformJob(
        tp=tp,
        dp=dp,
        ranks=tuple(r for stage, n in zip(stages, cut, strict=True) for r in _ranks(stage, n)),
        chunks=chunks,
        schedule=schedule,
        micro_batch=micro_batch,
        global_batch=global_batch,
        recompute=_recompute(stages, found),
        sequence_parallel=sequence_parallel(stages, found) and tp > 1,
        replacements=tuple(found),
    )


def _note_degrees(
    stages: tuple[Stage, ...], tp: int, dp: int, cut: list[int], found: list[Replacement]
) -> None:
    for s, (stage, parts) in enumerate(zip(stages, cut, strict=True)):
        if (stage.tp, stage.dp) == (tp, dp):
            continue
        what = f"stage {s} with dp {stage.dp} tp {stage.tp}"
        by = f"dp {dp} tp {tp}"
        if parts > 1:
            by += f" in {parts} stages of {', '.join(_counts(stage.layers, parts))} layers"
        found.append(Replacement(what, by))


def _counts(layers: tuple[int, int], parts: int) -> list[str]:
    return [str(last - first) for first, last in divided(layers, parts)]


def _chunks(
    plan: Plan,
    stages: tuple[Stage, ...],
    cut: list[int],
    schedules: dict[Schedule, str],
    found: list[Replacement],
) -> tuple[Schedule, tuple[tuple[int, int], ...]]:
    """Returns the schedule and the layers that it runs apart, in the order of the model."""
    schedule = plan.schedule
    alike = {stage.ministages for stage in stages}
    held = alike.pop()
    if schedule in schedules and not alike and set(cut) == {1} and schedule != "chimera":
        by_stage = ministage_layers(Pipeline(micro_batches=1, stages=stages), schedule)
        return schedule, tuple(sorted(chunk for own in by_stage for chunk in own))
    if schedule != "1f1b" or alike or held > 1:
        name = f"{schedule} with ministages" if alike or held > 1 else schedule
        found.append(Replacement(f"schedule {name}", schedules["1f1b"]))
    parts = (divided(stage.layers, n) for stage, n in zip(stages, cut, strict=True))
    return "1f1b", tuple(chunk for own in parts for chunk in own)


def _ranks(stage: Stage, parts: int) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the chips and ranks of each of the equal parts of a stage."""
    placed = [(rank, replica.chip) for replica in stage.replicas for rank in replica.ranks]
    size = len(placed) // parts
    cut = [placed[part * size : (part + 1) * size] for part in range(parts)]
    return [(together(chip for _, chip in own), tuple(rank for rank, _ in own)) for own in cut]


def _batches(
    plan: Plan, stages: tuple[Stage, ...], dp: int, found: list[Replacement]
) -> tuple[int, int]:
    """Returns the sequences of a replica's micro-batch and of the step."""
    global_batch = -(-plan.global_batch // dp) * dp
    if global_batch != plan.global_batch:
        found.append(
            Replacement(
                f"global batch of {plan.global_batch} sequences",
                f"{global_batch}, which {dp} replicas share",
            )
        )
    most = max(replica.batch_share for stage in stages for replica in stage.replicas)
    of_replica = global_batch // dp
    micro_batch = max(size for size in range(1, most + 1) if not of_replica % size)
    if micro_batch * dp != plan.micro_batch:
        found.append(
            Replacement(
                f"micro-batches of {plan.micro_batch} sequences",
                f"{micro_batch * dp}: {micro_batch} for each of {dp} replicas",
            )
        )
    return micro_batch, global_batch


def _recompute(stages: tuple[Stage, ...], found: list[Replacement]) -> Recompute | None:
    kinds = [
        "full" if stage.recompute else "selective" if stage.selective_recompute else None
        for stage in stages
    ]
    most: Recompute | None = (
        "full" if "full" in kinds else "selective" if "selective" in kinds else None
    )
    if len(set(kinds)) > 1:
        without = spans(s for s, kind in enumerate(kinds) if kind != most)
        found.append(
            Replacement(
                f"{most} recompute on some stages, not on {without}",
                f"{most} recompute on every stage, which costs time and saves memory",
            )
        )
    return most
