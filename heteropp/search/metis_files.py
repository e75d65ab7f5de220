"""Metis's files: profiles of a model's layers, and the nodes of a cluster.

Profiles are a folder of DeviceType.<type>_tp<tp>_bs<batch>.json, one for each chip type,
tensor-parallel degree and batch. A cluster file is a JSON object from address to chip type, memory
and bandwidths. What is read does not depend on the order of the folder.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field

from heteropp.description.files import FileError, read_json

PROFILE_NAME = re.compile(r"DeviceType\.(\w+?)_tp(\d+)_bs(\d+)\.json")
OPTIMIZERS = 2  # Metis counts the profiled optimizer twice
BANDWIDTH_UNIT = 2**20 * 1000  # bytes a second; Metis divides by 2**20 bytes a millisecond

Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Numbers = Annotated[tuple[Number, ...], Field(min_length=1)]


@dataclass(frozen=True)
class LayerProfile:
    """One chip type's layers at one tensor-parallel degree and batch; sequences are whole."""

    seconds: tuple[float, ...]  # forward and backward, by layer
    between_s: float  # a micro-batch's forward and backward take this beyond their layers
    memory_bytes: tuple[float, ...]  # of one chip, by layer
    # What Metis's files do not tell apart, of one chip: bytes by layer that a stage's replicas
    # divide, those that each micro-batch in flight keeps, and a stage's whatever its layers.
    divided_bytes: tuple[float, ...]
    kept_bytes: tuple[float, ...]
    stage_bytes: float


@dataclass(frozen=True)
class Profiles:
    """What Metis knows of a model; its first layer embeds and its last one is the head."""

    layers: int
    parameter_bytes: tuple[float, ...]  # by layer
    update_s: dict[str, float]  # of the whole model on one chip of a type
    batch_s: float  # to make one micro-batch's data
    by_type: dict[str, dict[tuple[int, int], LayerProfile]]  # by (tp, batch)


@dataclass(frozen=True)
class MetisNode:
    chip: str
    chips: int
    capacity_bytes: float  # of one chip
    intra_bytes_per_s: float
    inter_bytes_per_s: float
    # of a group inside the node, by its ranks from 0 on; (): as of messages
    collective_bytes_per_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class _Parameters:
    parameters_per_layer_bytes: Numbers


@dataclass(frozen=True)
class _Model:
    parameters: _Parameters


@dataclass(frozen=True)
class _Time:
    forward_backward_time_ms: Number
    batch_generator_time_ms: Number
    optimizer_time_ms: Number
    layer_compute_total_ms: Annotated[tuple[Positive, ...], Field(min_length=1)]


@dataclass(frozen=True)
class _Memory:
    layer_memory_total_mb: Numbers


@dataclass(frozen=True)
class _ProfileFile:
    __pydantic_config__ = ConfigDict(extra="ignore")
    model: _Model
    execution_time: _Time
    execution_memory: _Memory


@dataclass(frozen=True)
class _Node:
    __pydantic_config__ = ConfigDict(extra="ignore")
    instance_type: str
    inter_bandwidth: Positive
    intra_bandwidth: Positive
    memory: Positive  # GiB


def read_profiles(folder: Path, layers: int | None = None) -> Profiles:
    """Reads every profile in a folder, as they are or as of `layers` layers. Raises FileError.

    The layers between the first and the last are alike, so that those of another number, and those
    that a list lacks, are as the second.
    """
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise FileError(f"folder {folder} cannot be read: {error.strerror}") from None
    by_type: dict[str, dict[tuple[int, int], LayerProfile]] = {}
    whole: dict[str, _ProfileFile] = {}  # each type's at tp 1 and batch 1
    for name in names:
        found = PROFILE_NAME.fullmatch(name)
        if not found:
            continue
        chip, tp, batch = found[1], int(found[2]), int(found[3])
        file = read_json(folder / name, _ProfileFile)
        by_type.setdefault(chip, {})[tp, batch] = _layer_profile(folder / name, file, layers)
        if (tp, batch) == (1, 1):
            whole[chip] = file
    if not by_type:
        raise FileError(
            f"folder {folder} has no profile; expected files named "
            "DeviceType.<type>_tp<tp>_bs<batch>.json"
        )
    for chip in sorted(by_type.keys() - whole.keys()):
        raise FileError(f"folder {folder} lacks DeviceType.{chip}_tp1_bs1.json")
    parameters = {file.model.parameters.parameters_per_layer_bytes for file in whole.values()}
    counts = {len(profile.seconds) for table in by_type.values() for profile in table.values()}
    if len(parameters) > 1 or len(counts) > 1:
        raise FileError(f"folder {folder} has profiles of unlike models; expected one model's")
    parameter_bytes, count = parameters.pop(), counts.pop()
    longer = count / len(parameter_bytes)
    return Profiles(
        layers=count,
        parameter_bytes=_of_layers(parameter_bytes, count),
        update_s={
            chip: longer * OPTIMIZERS * 1e-3 * file.execution_time.optimizer_time_ms
            for chip, file in sorted(whole.items())
        },
        batch_s=1e-3 * max(f.execution_time.batch_generator_time_ms for f in whole.values()),
        by_type=by_type,
    )


def read_kinds(clusterfile: Path) -> dict[str, MetisNode]:
    """Nodes by address; each has one chip, as the file does not say how many. Raises FileError."""
    return {
        address: MetisNode(
            chip=node.instance_type,
            chips=1,
            capacity_bytes=node.memory * 2**30,
            intra_bytes_per_s=node.intra_bandwidth * BANDWIDTH_UNIT,
            inter_bytes_per_s=node.inter_bandwidth * BANDWIDTH_UNIT,
        )
        for address, node in read_json(clusterfile, dict[str, _Node]).items()
    }


def _layer_profile(path: Path, file: _ProfileFile, layers: int | None) -> LayerProfile:
    layer_ms = file.execution_time.layer_compute_total_ms
    memory_mb = file.execution_memory.layer_memory_total_mb
    counts = {len(layer_ms), len(memory_mb), len(file.model.parameters.parameters_per_layer_bytes)}
    if layers is None and len(counts) > 1:
        raise FileError(
            f"{path} has times, memory and parameters of unlike numbers of layers: "
            f"{', '.join(map(str, sorted(counts)))}"
        )
    if layers is not None and min(counts) < 3:
        raise FileError(
            f"{path} has {min(counts)} layers; expected a first, a last and one between"
        )
    between_ms = file.execution_time.forward_backward_time_ms - sum(layer_ms)
    memory = tuple(mb * 2**20 for mb in memory_mb)
    count = layers or len(layer_ms)
    nothing = (0.0,) * count
    return LayerProfile(
        seconds=_of_layers(tuple(1e-3 * ms for ms in layer_ms), count),
        between_s=max(0.0, 1e-3 * between_ms),
        memory_bytes=_of_layers(memory, count),
        divided_bytes=nothing,
        kept_bytes=nothing,
        stage_bytes=0.0,
    )


def _of_layers(values: tuple[float, ...], layers: int) -> tuple[float, ...]:
    if len(values) == layers:
        return values
    return (values[0], *(values[1],) * (layers - 2), values[-1])
