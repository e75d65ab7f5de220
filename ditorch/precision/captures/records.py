"""The files of a capture: one folder for each rank, and in it three kinds of file.

    <output>/rank00000/manifest.json              what was captured, where, and what was left out
    <output>/rank00000/step000003.jsonl           its calls, in order, and its tensors' statistics
    <output>/rank00000/step000003.safetensors     the tensors first seen in it, by their digest

A file appears under its name when all of it is on disk; a step counts once its .jsonl is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter

from ditorch.precision.captures.statistics import Statistics
from ditorch.precision.place import Phase, Place

VERSION = 1
_CONFIG = ConfigDict(extra="forbid", ser_json_inf_nan="strings")


@dataclass(frozen=True, slots=True)
class TensorUse:
    """A tensor as an argument or result; what it holds is found by its digest."""

    name: str  # of the schema: "self", "tensors.3", "out"
    digest: str  # "" for what the call does not read, and what cannot be: sparse tensors
    dtype: str  # "float32"
    shape: list[int]
    device: str
    strides: list[int] | None = None  # where the tensor is not contiguous
    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One operator call."""

    phase: Phase
    module: str
    operator: str
    index: int
    function: str
    source: str
    arguments: list[Any]  # as arguments.py writes them
    keywords: dict[str, Any]
    inputs: list[TensorUse]  # as they were before the call
    outputs: list[TensorUse]  # results, and arguments the call writes
    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Equal in two runs of one program, at one rank and step."""
        return (self.phase, self.module, self.operator, self.index)

    @property
    def group(self) -> tuple[str, str, str]:
        """The calls that `index` counts."""
        return (self.phase, self.module, self.operator)

    def place(self, rank: int, step: int) -> Place:
        return Place(
            rank,
            step,
            self.phase,
            self.module,
            self.operator,
            self.index,
            self.function,
            self.source,
        )


@dataclass(frozen=True, slots=True)
class Header:
    """The first line of a step's file."""

    step: int
    calls: int  # lines to come, so that a truncated file is noticed
    tensors: int
    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG


@dataclass(frozen=True, slots=True)
class Line:
    """Any other line: one of the two."""

    tensor: Statistics | None = None
    call: CallRecord | None = None
    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG


HEADER = TypeAdapter(Header)
LINE = TypeAdapter(Line)


def line_of(record: Header | Line) -> bytes:
    if isinstance(record, Header):
        return HEADER.dump_json(record)
    return LINE.dump_json(record, exclude_none=True)


class _RecordModel(BaseModel):
    model_config = _CONFIG


class LeftOut(_RecordModel):
    """What the budget had no room for."""

    tensors: int = 0
    tensor_bytes: int = 0
    first_step_without_all_tensors: int | None = None
    steps: int = 0  # of which not even the statistics are there
    first_step_missing: int | None = None

    def notes(self) -> list[str]:
        notes = []
        if self.tensors:
            notes.append(
                f"the budget left out {self.tensors} tensors ({self.tensor_bytes} bytes), "
                f"the first in step {self.first_step_without_all_tensors}"
            )
        if self.steps:
            notes.append(
                f"the budget left out {self.steps} steps, the first step {self.first_step_missing}"
            )
        return notes


class Manifest(_RecordModel):
    """What a rank's folder holds."""

    version: Literal[1] = 1
    rank: int
    world_size: int
    device: str  # "emuchip:0"
    chip: str  # "vendor B, B-MINI"
    torch: str
    tensors: Literal["none", "outputs", "all"]
    every: int
    every_steps: int
    selection: dict[str, str]
    budget_bytes: int
    used_bytes: int = 0
    left_out: LeftOut = LeftOut()


def rank_folder(output: Path, rank: int) -> Path:
    return output / f"rank{rank:05d}"


def step_path(folder: Path, step: int) -> Path:
    return folder / f"step{step:06d}.jsonl"


def tensors_path(folder: Path, step: int) -> Path:
    return folder / f"step{step:06d}.safetensors"
