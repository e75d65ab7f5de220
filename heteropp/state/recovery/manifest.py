"""What a rank kept of a step: its files, and of every tensor in them its box and checksum."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from heteropp.layout.boxes import Box
from heteropp.state.checkpoint.manifest import Manifest
from heteropp.state.checkpoint.reader import Quantity

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


@dataclass(frozen=True, order=True)
class Shard:
    """A rank's share of a block: one of `tp` parts, and of that one of ZeRO's `parts`."""

    tp_index: int = 0
    tp: int = 1
    part: int = 0
    parts: int = 1

    def __str__(self) -> str:
        zero = f" part {self.part}/{self.parts}" if self.parts > 1 else ""
        return f"{self.tp_index}/{self.tp}{zero}"

    @property
    def suffix(self) -> str:
        """The part of a file's name that tells the shard, such as "tp-0-of-2.part-1-of-4"."""
        zero = f".part-{self.part}-of-{self.parts}" if self.parts > 1 else ""
        return f"tp-{self.tp_index}-of-{self.tp}{zero}"


@dataclass(frozen=True)
class SnapshotTensor:
    """A tensor in a file: a quantity of a box of a parameter of the whole model."""

    quantity: Quantity
    name: str
    box: Box
    dtype: str
    begin: int  # byte of the file
    end: int
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


def checksum(content: bytes | memoryview) -> int:
    """CRC-32, which zlib computes at 4 GB/s and more: twice SHA-256 with the host's help.

    It is there to find what is torn or decayed, not what is forged: whoever writes into a job's
    folders can write manifests too. Sizes and offsets are compared besides.
    """
    return zlib.crc32(content)


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
