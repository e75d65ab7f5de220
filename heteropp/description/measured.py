"""Measured-run files: what real clusters took, as published, for fitting and for judging.

`presets/measured/NAME.toml` hold public ones, each with its source. What a fit may look at is
marked in the file (`fit = true`), so that the split is fixed before anything is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field

from heteropp.description.chips import ChipFileError, ChipSpec, load_chip
from heteropp.description.files import FileError, read_toml
from heteropp.description.plan import ZeroStage
from heteropp.description.presets import measured_path
from heteropp.models.spec import ModelError, ModelSpec

Count = Annotated[int, Field(ge=1, le=1_000_000)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=127)]
Chips = Annotated[tuple[Name, ...], Field(min_length=1)]


@dataclass(frozen=True, kw_only=True)
class Bars:
    """The errors asked for, as shares of what was measured, of runs that were not fitted."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    step_median: Share  # most that the median error of steps' seconds may be
    step_worst: Share  # most that the largest error of a step's seconds may be
    memory_worst: Share | None = None  # most that the largest error of a rank's peak memory may be


@dataclass(frozen=True, kw_only=True)
class MeasuredBlock:
    """The seconds of one block, for one micro-batch, as one tensor-parallel group took them."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    name: Name  # name of the measurement, which no other block or run of the file has
    model: Name  # name of one of the file's models
    chip: Name  # name of a chip preset, or of a chip file (.toml) beside this file
    tp: Count = 1  # tensor-parallel degree
    sequences: Count  # number of sequences in the micro-batch
    sequence_parallel: bool = False  # whether a replica's ranks split the rows of uncut activations
    selective_recompute: bool = False  # whether the backward computes attention's scores again
    forward_s: Rate  # seconds of the forward, collectives included
    backward_s: Rate  # seconds of the backward, collectives and what it computes again included
    fit: bool = False  # whether a fit may use it; otherwise it is predicted, to judge the fit


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """The seconds, and the most bytes of a rank, of a step of a whole pipeline."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    name: Name  # name of the run, which no other block or run of the file has
    model: Name  # name of one of the file's models
    layers: Annotated[tuple[Count, ...], Field(min_length=1)]  # number of layers of each stage
    chip: Name | None = None  # the chip of all replicas, where it is one
    dp: Count = 1  # number of replicas of each stage, where `chip` is given
    chips: tuple[Chips, ...] = ()  # in place of chip: the replicas' chips, by stage
    tp: Count = 1  # tensor-parallel degree of every stage
    micro_batch: Count  # number of sequences in a micro-batch of one replica
    global_batch: Count  # number of sequences in a step
    ministages: Count = 1  # number of ministages (virtual stages) of each stage
    recompute: bool = False  # whether the backward computes all activations again
    sequence_parallel: bool = False  # whether a replica's ranks split the rows of uncut activations
    selective_recompute: bool = False  # whether the backward computes attention's scores again
    zero_stage: ZeroStage = 0  # what replicas divide: 1 optimizer state, 2 gradients too, 0 none
    overlap: bool = True  # whether messages between stages go on beside the computing
    step_s: Rate  # seconds of a step
    memory_bytes: Annotated[int, Field(ge=1)] | None = None  # peak memory of the rank with the most
    fit: bool = False  # whether a fit may use it; otherwise it is predicted, to judge the fit
    doubt: str = ""  # why the prediction is not judged by this run; empty: it is

    @property
    def replicas(self) -> tuple[tuple[str, ...], ...]:
        """The chips of each stage's replicas."""
        if self.chip is None:
            return self.chips
        return ((self.chip,) * self.dp,) * len(self.layers)


@dataclass(frozen=True, kw_only=True)
class MeasuredRuns:
    """A file of measurements of one machine."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    name: Name  # name under which results are printed
    split: str  # in words, which measurements are fitted and why those
    lacks: str = ""  # in words, what the source does not tell and a prediction would have to know
    bars: Bars | None = None  # errors that predictions have to stay below
    # what its software does, and ours does not
    in_place_update: bool = False  # whether its update needs no memory beside the optimizer's state
    gathers_again: bool = False  # whether inputs cut by rows are gathered again for the backward
    nic_bytes_per_s: Rate | None = None  # bandwidth of one NIC; absent: as the chip file says
    models: tuple[ModelSpec, ...]  # the models that were run, each as a model file has it
    blocks: tuple[MeasuredBlock, ...] = ()  # what single blocks took
    runs: tuple[MeasuredStep, ...] = field(default=())  # what whole steps took

    def model(self, name: str) -> ModelSpec:
        """Returns one of its models."""
        return next(model for model in self.models if model.name == name)

    @property
    def chip_names(self) -> list[str]:
        """The chips of all blocks and runs, sorted."""
        of_runs = {chip for run in self.runs for stage in run.replicas for chip in stage}
        return sorted(of_runs | {block.chip for block in self.blocks})


def read_chips(path: str | Path, file: MeasuredRuns) -> dict[str, ChipSpec]:
    """Reads the chips of a measured-run file: presets, or files beside it. Raises FileError."""
    folder = measured_path(path).parent
    try:
        return {
            name: load_chip(folder / name if name.endswith(".toml") else name)
            for name in file.chip_names
        }
    except ChipFileError as error:
        raise FileError(f"{path}: {error}") from None


def read_measured(path: str | Path) -> MeasuredRuns:
    """Reads a measured-run file, or a preset by name. Raises FileError."""
    path = measured_path(path)
    file = read_toml(path, MeasuredRuns)
    for model in file.models:
        try:
            model.validate()
        except ModelError as error:
            raise FileError(f"{path}: model {model.name}: {error}") from None
    models = {model.name for model in file.models}
    if len(models) < len(file.models):
        raise FileError(f"{path}: two models have the same name; expected names that differ")
    points = [("blocks", point) for point in file.blocks] + [("runs", run) for run in file.runs]
    seen: set[str] = set()
    for kind, point in points:
        where = f"{path}: {kind} {point.name!r}"
        if point.name in seen:
            raise FileError(f"{where} is there twice; expected names that differ")
        seen.add(point.name)
        if point.model not in models:
            expected = ", ".join(sorted(models))
            raise FileError(f"{where}: model {point.model!r} is unknown; expected {expected}")
        if isinstance(point, MeasuredStep):
            _check_run(point, file.model(point.model), where)
    return file


def _check_run(run: MeasuredStep, model: ModelSpec, where: str) -> None:
    if (run.chip is None) == (not run.chips):
        raise FileError(f"{where} has chip and chips, or none of them; expected one")
    if len(run.replicas) != len(run.layers):
        raise FileError(f"{where}: chips has {len(run.chips)} stages, layers {len(run.layers)}")
    if sum(run.layers) != model.layers:
        raise FileError(
            f"{where}: layers add up to {sum(run.layers)}; the model has {model.layers}"
        )
    counts = {len(stage) for stage in run.replicas}
    if len(counts) != 1:
        raise FileError(f"{where}: stages have {sorted(counts)} replicas; expected as many in each")
    whole = run.micro_batch * counts.pop()
    if run.global_batch % whole:
        raise FileError(
            f"{where}: global_batch {run.global_batch} is no multiple of the {whole} sequences of "
            "a micro-batch"
        )
