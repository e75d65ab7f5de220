"""What a checkpoint is of: its manifest, which is written last."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import ConfigDict

from heteropp.data.sequences import AttentionWithin
from heteropp.description.files import FileError, read_json
from heteropp.description.hyperparameters import Hyperparameters
from heteropp.models.spec import ModelSpec
from heteropp.state.slices.hashes import sha256_of
from heteropp.state.slices.parameter_slice import ParameterSlice
from heteropp.state.slices.scalars import Scalars

MANIFEST_VERSION = 2
MANIFEST = "manifest.json"
GUARD = ("most_skipped", "spike_factor", "skip_spikes")  # settings that may change on a resume
NAME = re.compile(r"step-(\d{6,})")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message is one sentence naming the file."""


@dataclass(frozen=True)
class CheckpointFile:
    """Values and optimizer state of slices of one block of the model, as a rank held them."""

    name: str
    bytes: int
    sha256: str
    rank: int
    slices: tuple[ParameterSlice, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    __pydantic_config__ = ConfigDict(extra="forbid")
    step: int  # completed steps; with the seed it is also the position in the data
    model: ModelSpec
    global_batch: int
    whole_documents: bool = False  # of mixed lengths; otherwise they are packed
    attention_within: AttentionWithin = "sequence"  # where documents are packed
    seed: int
    tokens_sha256: str
    hyperparameters: Hyperparameters
    scalars: Scalars = field(default_factory=Scalars)
    files: tuple[CheckpointFile, ...] = ()
    version: int = MANIFEST_VERSION


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    manifest: Manifest


def find(folder: Path, step: int | None = None) -> Checkpoint | None:
    """Returns a folder's checkpoint of a step, or its newest; None where there is none.

    Raises FileError for a manifest that is damaged.
    """
    found = [path for completed, path in steps(folder) if step in (None, completed)]
    return read(found[-1]) if found else None


def read(path: Path) -> Checkpoint:
    """Returns the checkpoint in a step's folder.

    Raises FileError for a manifest that is missing or damaged.
    """
    manifest = read_json(path / MANIFEST, _Version)
    if manifest.version != MANIFEST_VERSION:
        raise FileError(
            f"{path / MANIFEST}: version is {manifest.version}; "
            f"this release reads version {MANIFEST_VERSION}"
        )
    checkpoint = Checkpoint(path, read_json(path / MANIFEST, Manifest))
    match = NAME.fullmatch(path.name)
    if match and checkpoint.manifest.step != int(match[1]):
        raise FileError(
            f"{path / MANIFEST}: step is {checkpoint.manifest.step}; expected {int(match[1])}"
        )
    return checkpoint


@dataclass(frozen=True)
class _Version:
    version: int


def steps(folder: Path) -> list[tuple[int, Path]]:
    """Returns the step and folder of each complete checkpoint, oldest first.

    A folder without a manifest was never finished, and is left out.
    """
    found = []
    for path in folder.glob("step-*"):
        match = NAME.fullmatch(path.name)
        if match and (path / MANIFEST).exists():
            found.append((int(match[1]), path))
    return sorted(found)


def verify(checkpoint: Checkpoint) -> None:
    """Checks that every file is there and as it was written. Raises CheckpointError."""
    for file in checkpoint.manifest.files:
        verify_file(checkpoint.path, file)


def verify_file(path: Path, file: CheckpointFile) -> None:
    """Checks one file of a step's folder. Raises CheckpointError."""
    try:
        size = (path / file.name).stat().st_size
        if size != file.bytes:
            raise CheckpointError(
                f"{path / file.name} is damaged: it has {size} bytes; "
                f"the manifest says {file.bytes}"
            )
        with open(path / file.name, "rb") as content:
            found = sha256_of(content)
    except OSError as error:
        raise CheckpointError(f"{path / file.name} cannot be read: {error.strerror}") from None
    if found != file.sha256:
        raise CheckpointError(f"{path / file.name} is damaged: its hash is not the manifest's")


def newest_whole(folder: Path, before: int) -> Checkpoint | None:
    """The newest checkpoint of an earlier step that is undamaged, if there is one."""
    for step, path in reversed(steps(folder)):
        if step >= before:
            continue
        try:
            checkpoint = read(path)
            verify(checkpoint)
        except (FileError, CheckpointError):
            continue
        return checkpoint
    return None


def check_resumable(checkpoint: Checkpoint, run: Manifest) -> None:
    """Raises CheckpointError unless a run goes on exactly where the checkpoint left off.

    The plan may be another one, as long as it trains the same model on the same batches.
    """
    path, saved = checkpoint.path, checkpoint.manifest
    if saved.tokens_sha256 != run.tokens_sha256:
        raise CheckpointError(f"{path} was made with other data; give the same --data")
    names = ("seed", "global_batch", "whole_documents", "attention_within")
    ours = {**asdict(run.hyperparameters), **{name: getattr(run, name) for name in names}}
    theirs = {**asdict(saved.hyperparameters), **{name: getattr(saved, name) for name in names}}
    ours.update({f"model.{name}": value for name, value in run.model.identity().items()})
    theirs.update({f"model.{name}": value for name, value in saved.model.identity().items()})
    for name, value in theirs.items():
        if ours[name] != value and name not in GUARD:
            raise CheckpointError(
                f"{path} was made with {name} {value}, not {ours[name]}; "
                "a resumed run keeps its settings"
            )
