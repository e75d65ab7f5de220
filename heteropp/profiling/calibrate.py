"""What a chip must reach for a measured throughput to be what we predict.

Papers and logs often give no more of a chip than the throughput of one homogeneous run (H2, Table
6). The one thing of the chip that such a figure can tell is its compute efficiency, the share of
the peak that products of matrices reach, all else being as the chip, cluster and model files say.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from heteropp.cost.planned import rank_memory, rank_times
from heteropp.cost.stage_time import formula_s
from heteropp.description.chips import ChipSpec, load_chip
from heteropp.description.cluster import Cluster
from heteropp.description.files import FileError, read_text, write_text
from heteropp.description.plan import Pipeline, Plan, Replica, Stage, validate
from heteropp.models.spec import ModelSpec
from heteropp.simulator.simulate import simulate

CLOSE = 2e-4  # of the step's time, for the solver
TOLERANCE = 1e-3  # of the throughput that is found
LEAST_EFFICIENCY = 1e-3


class CalibrationError(ValueError):
    """No efficiency explains the measurement; the message is one sentence."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A measured run of a whole cluster of one chip type, every stage alike."""

    cluster: Cluster
    model: ModelSpec
    global_batch: int  # sequences
    pp: int
    dp: int
    tp: int
    recompute: bool = False
    offload: bool = False
    zero_stage: int = 0
    tokens_per_chip_per_s: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    chip: str
    efficiency: float  # rounded to 3 decimals, as chip files hold it
    tokens_per_chip_per_s: float  # predicted, before rounding
    memory_bytes: int  # most that a rank needs
    capacity_bytes: int


def calibrate(run: MeasuredRun) -> Calibration:
    """Returns the efficiency at which the simulated run has the measured throughput.

    The simulated 1F1B is the usual one, whose backwards are not cut in two.

    Raises CalibrationError, and PlanError where the run's degrees do not fit the cluster or model.
    """
    plan = uniform_plan(run)
    chip = run.cluster.nodes[0].chip
    target_s = (
        plan.global_batch
        * plan.model.sequence_length
        / (plan.world_size * run.tokens_per_chip_per_s)
    )

    def at(efficiency: float) -> Cluster:
        return with_efficiency(run.cluster, efficiency)

    def simulated_s(efficiency: float) -> float:
        return simulate(plan, at(efficiency), whole_backwards=True).step_s

    efficiency, step_s = _solve(lambda e: _formula_s(plan, at(e)), simulated_s, target_s)
    found = _throughput(plan, step_s)
    if abs(found / run.tokens_per_chip_per_s - 1) > TOLERANCE:
        raise CalibrationError(
            f"no efficiency explains {run.tokens_per_chip_per_s:g} tokens per chip and second; "
            f"with {efficiency:.3g}, the nearest, chip {_name(run)} reaches {found:.4g}"
        )
    return Calibration(
        chip=_name(run),
        efficiency=round(efficiency, 3),
        tokens_per_chip_per_s=found,
        memory_bytes=max(memory.total for memory in rank_memory(plan, run.cluster)),
        capacity_bytes=chip.memory.capacity_bytes,
    )


def uniform_plan(run: MeasuredRun) -> Plan:
    """Returns a plan whose stages have equal layers, replicas and ranks. Raises PlanError."""
    names = run.cluster.chip_names()
    if len(names) > 1:
        raise CalibrationError(
            f"cluster {run.cluster.name} has chips {', '.join(names)}; expected one type"
        )
    if run.pp * run.dp * run.tp != run.cluster.world_size:
        raise CalibrationError(
            f"pp {run.pp} x dp {run.dp} x tp {run.tp} is {run.pp * run.dp * run.tp}; cluster "
            f"{run.cluster.name} has {run.cluster.world_size} chips"
        )
    if run.model.layers % run.pp:
        raise CalibrationError(f"pp {run.pp} does not divide the model's {run.model.layers} layers")
    if run.global_batch % run.dp:
        raise CalibrationError(f"dp {run.dp} does not divide the global batch {run.global_batch}")
    size = run.model.layers // run.pp
    stages = tuple(
        Stage(
            layers=(s * size, (s + 1) * size),
            recompute=run.recompute,
            offload=run.offload,
            replicas=tuple(
                Replica(ranks=tuple(range(first, first + run.tp)), chip=names[0], batch_share=1)
                for first in range(s * run.dp * run.tp, (s + 1) * run.dp * run.tp, run.tp)
            ),
        )
        for s in range(run.pp)
    )
    plan = Plan(
        model=run.model,
        global_batch=run.global_batch,
        micro_batch=run.dp,
        schedule="1f1b",
        zero_stage=run.zero_stage,  # type: ignore[arg-type]
        pipelines=(Pipeline(micro_batches=run.global_batch // run.dp, stages=stages),),
    )
    validate(plan)
    return plan


def with_efficiency(cluster: Cluster, efficiency: float) -> Cluster:
    """Returns the same cluster with chips that reach another share of their peak."""
    chips: dict[int, ChipSpec] = {}
    nodes = []
    for node in cluster.nodes:
        chip = node.chip
        if id(chip) not in chips:
            chips[id(chip)] = chip.with_efficiency(efficiency)
        nodes.append(replace(node, chip=chips[id(chip)]))
    return replace(cluster, nodes=tuple(nodes))


def write_efficiency(chip_file: Path, efficiency: float, output: Path) -> None:
    """Writes a chip file with another efficiency for products of every dtype, and all else as it
    is. Raises FileError.
    """
    chip = load_chip(chip_file)
    text, found = re.subn(
        r"(?m)^(\s*efficiency\s*=\s*)[^\s#]+",
        lambda match: f"{match[1]}{efficiency:g}",
        read_text(chip_file),
    )
    if found != 1:
        raise FileError(f"{chip_file}: expected one line with efficiency, found {found}")
    if chip.kernels:  # figures of single dtypes would stand in its place
        kept = chip.with_efficiency(efficiency).kernels
        for name, value in asdict(chip.kernels).items():
            if value is not None and getattr(kept, name) is None:
                text = re.sub(rf"(?m)^[ \t]*{name}[ \t]*=.*\n?", "", text)
    write_text(output, text)


def _solve(
    formula_s: Callable[[float], float], simulated_s: Callable[[float], float], target_s: float
) -> tuple[float, float]:
    """Returns the efficiency at which a simulated step takes `target_s`, and that step's seconds.

    The quick formula is solved for it; each simulation then corrects what it is solved for.
    """
    wanted_s = target_s
    for _ in range(8):
        efficiency = _bisect(formula_s, wanted_s)
        step_s = simulated_s(efficiency)
        if abs(step_s / target_s - 1) < CLOSE:
            break
        wanted_s *= target_s / step_s
    return efficiency, step_s


def _bisect(step_s: Callable[[float], float], wanted_s: float) -> float:
    """Returns the efficiency where a falling function has a value, or else the nearer end."""
    low, high = LEAST_EFFICIENCY, 1.0
    while high / low - 1 > 1e-7:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if step_s(middle) > wanted_s else (low, middle)
    return high


def _formula_s(plan: Plan, cluster: Cluster) -> float:
    """Returns a step's seconds by the formula of section 4.3.2."""
    pipeline = plan.pipelines[0]
    times = rank_times(plan, cluster)
    firsts = [stage.replicas[0].ranks[0] for stage in pipeline.stages]
    return formula_s([times[rank] for rank in firsts], pipeline.micro_batches, alpha=1.0)


def _throughput(plan: Plan, step_s: float) -> float:
    return plan.global_batch * plan.model.sequence_length / step_s / plan.world_size


def _name(run: MeasuredRun) -> str:
    return run.cluster.nodes[0].chip_name
