"""Checkpoints: a folder a step, which appears whole or not at all.

    checkpoints/step-000060/
        rank-00000.safetensors   parameters (from the first replica of each stage) and the
                                 optimizer's shard, under their global names
        manifest.json            step, plan, hyperparameters, data, and every file's size and hash

Ranks write into a hidden folder that all of them reach; the manifest is written last, then the
folder gets its name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from pydantic import ConfigDict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from heteropp.files import FileError, read_json, write_text
from heteropp.hyperparameters import Hyperparameters
from heteropp.plan import Plan
from heteropp.training.control import Control

MANIFEST_VERSION = 1
NAME = re.compile(r"step-(\d{6,})")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message is one sentence naming the file."""


@dataclass(frozen=True)
class File:
    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    __pydantic_config__ = ConfigDict(extra="forbid")
    step: int  # completed steps; with the seed it is also the position in the data
    plan_sha256: str
    seed: int
    tokens_sha256: str
    hyperparameters: Hyperparameters
    files: tuple[File, ...] = ()
    version: int = MANIFEST_VERSION


def plan_sha256(plan: Plan) -> str:
    """Names a plan; its prediction is not part of it."""
    content = {key: value for key, value in asdict(plan).items() if key != "prediction"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def save(
    folder: Path, manifest: Manifest, tensors: Mapping[str, Tensor], control: Control, keep: int
) -> None:
    """Writes a checkpoint of this step; every rank calls it with its own tensors.

    Keeps the newest `keep` checkpoints of the folder.
    """
    step = f"step-{manifest.step:06d}"
    partial = folder / f".{step}.partial"
    if control.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    control.barrier(f"{step}/begin")
    own = partial / rank_file(control.rank)
    save_file({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}, own)
    _flush(own)
    file = File(own.name, own.stat().st_size, _sha256(own))
    control.publish(f"{step}/written", json.dumps(asdict(file)))
    if control.rank == 0:
        files = tuple(File(**json.loads(text)) for text in control.collect(f"{step}/written"))
        content = {**asdict(manifest), "files": [asdict(file) for file in files]}
        write_text(partial / "manifest.json", json.dumps(content, indent=2) + "\n")
        _flush(partial)
        shutil.rmtree(folder / step, ignore_errors=True)
        partial.rename(folder / step)
        _flush(folder)
        for _, old in _steps(folder)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    control.barrier(f"{step}/end")


def latest(folder: Path) -> tuple[Path, Manifest] | None:
    """The newest checkpoint of a folder. Raises FileError for a manifest that is damaged."""
    steps = _steps(folder)
    if not steps:
        return None
    step, path = steps[-1]
    manifest = read_json(path / "manifest.json", Manifest)
    if manifest.version != MANIFEST_VERSION:
        raise FileError(
            f"{path / 'manifest.json'}: version is {manifest.version}; "
            f"this release reads version {MANIFEST_VERSION}"
        )
    if manifest.step != step:
        raise FileError(f"{path / 'manifest.json'}: step is {manifest.step}; expected {step}")
    return path, manifest


def verify(path: Path, manifest: Manifest) -> None:
    """Checks that every file of a checkpoint is there and as it was written."""
    for file in manifest.files:
        _verify(path, file)


def load(path: Path, manifest: Manifest, rank: int) -> dict[str, Tensor]:
    """The tensors that a rank saved, on the host. Raises CheckpointError for a damaged file."""
    file = next((file for file in manifest.files if file.name == rank_file(rank)), None)
    if file is None:
        raise CheckpointError(f"{path / 'manifest.json'} does not list {rank_file(rank)}")
    _verify(path, file)
    try:
        with safe_open(path / file.name, framework="pt") as tensors:
            return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(f"{path / file.name} is not a safetensors file: {error}") from None


def fill(target: Tensor, tensors: Mapping[str, Tensor], name: str, path: Path) -> None:
    """Copies a loaded tensor into its place. Raises CheckpointError when it does not fit."""
    if name not in tensors:
        raise CheckpointError(f"{path} holds no {name}")
    source = tensors[name]
    if source.shape != target.shape or source.dtype != target.dtype:
        raise CheckpointError(
            f"{path}: {name} is {source.dtype} {tuple(source.shape)}; "
            f"expected {target.dtype} {tuple(target.shape)}"
        )
    with torch.no_grad():
        target.copy_(source)


def check_resumable(path: Path, saved: Manifest, run: Manifest) -> None:
    """Raises CheckpointError unless a run goes on exactly where the checkpoint left off."""
    if saved.plan_sha256 != run.plan_sha256:
        raise CheckpointError(
            f"{path} was made under another plan; this release resumes only under the same one"
        )
    if saved.tokens_sha256 != run.tokens_sha256:
        raise CheckpointError(f"{path} was made with other data; give the same --data")
    ours, theirs = asdict(run.hyperparameters), asdict(saved.hyperparameters)
    ours["seed"], theirs["seed"] = run.seed, saved.seed
    for name, value in theirs.items():
        if ours[name] != value:
            raise CheckpointError(
                f"{path} was made with {name} {value}, not {ours[name]}; "
                "a resumed run keeps its settings"
            )


def _steps(folder: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints, oldest first; a folder without a manifest was never finished."""
    found = []
    for path in folder.glob("step-*"):
        match = NAME.fullmatch(path.name)
        if match and (path / "manifest.json").exists():
            found.append((int(match[1]), path))
    return sorted(found)


def _verify(path: Path, file: File) -> None:
    try:
        size = (path / file.name).stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path / file.name} cannot be read: {error.strerror}") from None
    if size != file.bytes:
        raise CheckpointError(
            f"{path / file.name} is damaged: it has {size} bytes; the manifest says {file.bytes}"
        )
    if _sha256(path / file.name) != file.sha256:
        raise CheckpointError(f"{path / file.name} is damaged: its hash is not the manifest's")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Puts a file, or a folder's list of names, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
