"""What a rank kept of a step: its files, and of every tensor in them its box and checksum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from heteropp.state.checkpoint.manifest import Manifest
from heteropp.state.slices.hashes import checksum
from heteropp.state.slices.parameter_slice import Shard, StoredSlice

KEPT_VERSION = 1
TierKind = Literal["memory", "disk", "remote"]


@dataclass(frozen=True, order=True)
class SnapshotStep:
    """A step as a generation came to it."""

    step: int
    generation: int

    @property
    def folder(self) -> str:
        return f"step-{self.step:06d}.generation-{self.generation:04d}"


@dataclass(frozen=True)
class SnapshotTensor(StoredSlice):
    """A tensor in a snapshot's file."""

    crc32: int


@dataclass(frozen=True)
class SnapshotFile:
    """A rank's share of a block of the model."""

    name: str
    block: str
    shard: Shard
    bytes: int
    parts: tuple[SnapshotTensor, ...]


@dataclass(frozen=True, kw_only=True)
class RankManifest:
    __pydantic_config__ = ConfigDict(extra="forbid")
    job: str
    generation: int
    rank: int
    run: Manifest  # step, settings and scalars; its files are none
    holders: dict[str, tuple[str, ...]]  # by block, the nodes of all ranks that held some of it
    files: tuple[SnapshotFile, ...]
    version: int = KEPT_VERSION

    @property
    def step(self) -> SnapshotStep:
        return SnapshotStep(self.run.step, self.generation)


_adapter = TypeAdapter(RankManifest)


def encoded(manifest: RankManifest) -> tuple[str, bytes]:
    """Returns the file name and content; the name has the checksum that tells a torn file."""
    content = _adapter.dump_json(manifest)
    return f"rank-{manifest.rank:05d}.{checksum(content):08x}.json", content


def decoded(name: str, content: bytes) -> RankManifest | None:
    """Returns the manifest, or None for one that is not whole or is of another version."""
    try:
        manifest = _adapter.validate_json(content)
    except ValidationError:
        return None
    whole = name == f"rank-{manifest.rank:05d}.{checksum(content):08x}.json"
    return manifest if whole and manifest.version == KEPT_VERSION else None
