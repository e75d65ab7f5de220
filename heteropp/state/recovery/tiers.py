"""Where snapshots lie: host memory, a node's disk, a remote store. All are fsspec's."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from heteropp.description.files import FileError
from heteropp.state.recovery.manifest import RankManifest, SnapshotStep, TierKind, decoded, encoded

FOLDER = re.compile(r"step-(\d{6,})\.generation-(\d{4,})")
MANIFEST = re.compile(r"rank-\d{5,}\.[0-9a-f]{8}\.json")


@dataclass(frozen=True)
class Tier:
    kind: TierKind
    url: str  # a folder

    def write(self, step: SnapshotStep, name: str, content: bytes) -> None:
        """Writes a file of a step; it counts once a manifest names it.

        Nothing is flushed to a disk: a file that a power failure tears is known by its checksum.
        """
        files, root = self._place
        files.makedirs(f"{root}/{step.folder}", exist_ok=True)
        files.pipe_file(f"{root}/{step.folder}/{name}", content)

    def write_manifest(self, manifest: RankManifest) -> None:
        """Makes the rank's files of the step count."""
        self.write(manifest.step, *encoded(manifest))

    def manifests(self, job: str) -> Iterator[RankManifest | Exception]:
        """Yields the job's manifests that are whole, and an exception for each that it cannot read.

        Each lists only those of its files that are there with the size that it says.
        """
        for step in self.steps():
            try:
                sizes = self._sizes(step)
            except Exception as error:  # of whatever store
                yield error
                continue
            names = [name for name in sorted(sizes) if MANIFEST.fullmatch(name) and sizes[name]]
            found = self.read(step, [(name, 0, sizes[name]) for name in names])
            for name, content in zip(names, found, strict=True):
                if isinstance(content, FileNotFoundError):  # it was just replaced
                    continue
                if isinstance(content, Exception):
                    yield content
                    continue
                manifest = decoded(name, content)
                if manifest is None or manifest.job != job or manifest.step != step:
                    continue
                there = (file for file in manifest.files if sizes.get(file.name) == file.bytes)
                yield replace(manifest, files=tuple(there))

    def read(
        self, step: SnapshotStep, ranges: list[tuple[str, int, int]]
    ) -> list[bytes | Exception]:
        """Reads byte ranges [begin, end) of files; gives an exception for each that it cannot."""
        files, root = self._place
        paths = [f"{root}/{step.folder}/{name}" for name, _, _ in ranges]
        begins, ends = [begin for _, begin, _ in ranges], [end for _, _, end in ranges]
        return files.cat_ranges(paths, begins, ends, on_error="return")

    def steps(self) -> list[SnapshotStep]:
        """Returns the steps that have a folder, oldest first, whole or not."""
        files, root = self._place
        files.invalidate_cache()
        try:
            paths = files.ls(root, detail=False)
        except FileNotFoundError:
            return []
        matches = (FOLDER.fullmatch(_name(path)) for path in paths)
        return sorted(SnapshotStep(int(match[1]), int(match[2])) for match in matches if match)

    def remove_rank(self, step: SnapshotStep, rank: int) -> None:
        """Removes a rank's files of a step, its manifest first: without it the others do not count.

        The step's folder goes with the last file in it.
        """
        files, root = self._place
        own = [name for name in self._sizes(step) if f"rank-{rank:05d}." in name]
        for name in sorted(own, key=lambda name: not MANIFEST.fullmatch(name)):
            with contextlib.suppress(FileNotFoundError):
                files.rm_file(f"{root}/{step.folder}/{name}")
        with contextlib.suppress(OSError):  # others' files are in it still
            files.rmdir(f"{root}/{step.folder}")

    def remove(self, step: SnapshotStep) -> None:
        files, root = self._place
        with contextlib.suppress(FileNotFoundError):  # another rank was faster
            files.rm(f"{root}/{step.folder}", recursive=True)

    def clear(self) -> None:
        """Removes all of the steps."""
        files, root = self._place
        with contextlib.suppress(FileNotFoundError):
            files.rm(root, recursive=True)

    def _sizes(self, step: SnapshotStep) -> dict[str, int]:
        """Returns the sizes in bytes of a step's files, by file name."""
        files, root = self._place
        files.invalidate_cache()
        try:
            entries = files.ls(f"{root}/{step.folder}", detail=True)
        except FileNotFoundError:
            return {}
        return {_name(entry["name"]): entry["size"] for entry in entries}

    @cached_property
    def _place(self) -> tuple[AbstractFileSystem, str]:
        return url_to_fs(self.url)


@dataclass(frozen=True, kw_only=True)
class Tiers:
    """The tiers that a node reaches: the remote one, which all nodes share, and its own.

    job: a name that no other job has; what another one left in the same folders is not believed.
    """

    job: str
    memory: Path | str | None  # a folder of the node's; a path, or a URL as fsspec takes it
    disk: Path | str | None
    remote: str | None

    def own(self) -> list[Tier]:
        """Returns the node's own tiers, nearest first."""
        pairs: list[tuple[TierKind, Path | str | None]] = [
            ("memory", self.memory),
            ("disk", self.disk),
        ]
        return [Tier(kind, str(place)) for kind, place in pairs if place is not None]

    def each(self) -> list[Tier]:
        """Returns all tiers, nearest first."""
        return self.own() + ([Tier("remote", self.remote)] if self.remote else [])


def check_url(url: str) -> None:
    """Raises FileError for a URL that fsspec cannot open."""
    try:
        url_to_fs(url)
    except (ValueError, ImportError) as error:  # its own sentence says what to install
        raise FileError(f"store {url}: {error}") from None


def _name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
