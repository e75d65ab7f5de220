"""Whether a token file is as it was written: its tokens and ends have a sha256 in its header.

Hashing runs at one to two GB/s. A file below `SMALL_BYTES` is hashed at each start, in a second at
most; of a larger one, what was found is kept in the cache folder, so that a restart or a resume
begins at once. It holds for that path, inode, size and times of change: whatever writes to a file
changes its ctime, which no program can set. Bytes that rot on the disk without being written go
unnoticed there; removing the folder `verified` has every file hashed again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from heteropp.data.token_file import TokenFile
from heteropp.description.files import FileError, cache_folder, write_text

SMALL_BYTES = 1 << 30
PIECE_BYTES = 4 << 20

Progress = Callable[[int, int], None]  # bytes done, of all


def verify(
    tokens: TokenFile,
    progress: Progress = lambda done, total: None,
    small_bytes: int = SMALL_BYTES,
) -> None:
    """Raises FileError unless the file has the tokens and ends that were written to it."""
    mapped = tokens.tokens
    assert isinstance(mapped, np.memmap) and mapped.filename
    path, begin = Path(mapped.filename), mapped.offset
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            note = cache_folder() / "verified" / _key(path, status, tokens.sha256)
            if status.st_size >= small_bytes and note.exists():
                return
            file.seek(begin)
            digest, done = hashlib.sha256(), 0
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
                progress(done := done + len(piece), status.st_size - begin)
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from None
    if digest.hexdigest() != tokens.sha256:
        raise FileError(
            f"{path} is damaged: it does not hold what was written to it, by the sha256 in its "
            "header; "
            + ("make it again with heteropp-data" if path == tokens.path else "remove it")
        )
    if status.st_size >= small_bytes:
        with suppress(FileError):  # else it is hashed again
            write_text(note, f"{path.absolute()}\n")


def _key(path: Path, status: os.stat_result, sha256: str) -> str:
    where = (os.path.realpath(path), status.st_dev, status.st_ino)
    when = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return hashlib.sha256(repr((*where, *when, sha256)).encode()).hexdigest()
