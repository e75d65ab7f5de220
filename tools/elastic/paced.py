"""A store whose reads take the time that they would over one link, which all processes share."""

from __future__ import annotations

import fcntl
import struct
import time
from functools import cache
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

LINK = ".link"  # a file above the store's: bytes per second, and when the link is free again


def write_link(folder: Path, bytes_per_s: float) -> None:
    """All reads of tensors below the folder share a link of this bandwidth."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LINK).write_bytes(struct.pack("dd", bytes_per_s, 0.0))


class Paced(LocalFileSystem):
    """paced:///path, for readers; manifests come at once, as their size is not a model's."""

    protocol = "paced"

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        content = super().cat_file(path, start, end, **kwargs)
        if path.endswith(".safetensors"):
            _sleep_until(_passed_s(_link(Path(path).parent), len(content)))
        return content

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return LocalFileSystem._strip_protocol(str(path).removeprefix("paced://"))


fsspec.register_implementation(Paced.protocol, Paced, clobber=True)


def _passed_s(link: Path, size_bytes: int) -> float:
    """When the link has passed so much more, on the machine's monotonic clock."""
    with open(link, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        bytes_per_s, free_s = struct.unpack("dd", file.read())
        passed_s = max(free_s, time.monotonic()) + size_bytes / bytes_per_s
        file.seek(0)
        file.write(struct.pack("dd", bytes_per_s, passed_s))
    return passed_s


@cache
def _link(folder: Path) -> Path:
    return next(above / LINK for above in folder.parents if (above / LINK).exists())


def _sleep_until(end_s: float) -> None:
    time.sleep(max(0.0, end_s - time.monotonic()))
