"""Training data: the bytes of every text file under a folder, one token a byte.

Sequence i of step s is a function of (seed, s, i) and the tokens alone, so every layout and every
resumed run sees the same batches.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from heteropp.files import cache_folder

VOCABULARY = 256  # token 0 never occurs in text and stands between files


class DataError(ValueError):
    """Data that cannot be trained on; the message is one sentence."""


class Tokens:
    """A memory-mapped token file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sha256 = path.stem
        self.tokens = np.memmap(path, dtype=np.uint8, mode="r")

    def sequences(self, seed: int, step: int, indices: Sequence[int], length: int) -> np.ndarray:
        """[len(indices), length + 1] int64: inputs are all but the last, targets all but the first.

        Raises DataError when the text is shorter than one sequence.
        """
        last = len(self.tokens) - length - 1
        if last < 0:
            raise DataError(
                f"{self.path} has {len(self.tokens)} bytes of text; one sequence needs {length + 1}"
            )
        starts = (int(np.random.default_rng((seed, step, i)).integers(last + 1)) for i in indices)
        rows = [self.tokens[start : start + length + 1] for start in starts]
        return np.stack(rows).astype(np.int64)


def open_tokens(folder: Path | None, cache: Path | None = None) -> Tokens:
    """The tokens of a folder, or of the Python standard library's sources when it is None.

    Makes the token file when it is missing; ranks that come at once wait for the first.
    Raises DataError when there is no text, or a file cannot be read or written.
    """
    cache = cache or cache_folder()
    source = folder if folder is not None else Path(sysconfig.get_paths()["stdlib"])
    if not source.is_dir():
        raise DataError(f"{source} is not a folder of text files")
    try:
        return _cached_tokens(source, ".py" if folder is None else "", cache)
    except OSError as error:
        raise DataError(f"{error.filename} cannot be used: {error.strerror}") from None


def _cached_tokens(source: Path, suffix: str, cache: Path) -> Tokens:
    files = list(_text_files(source, suffix))
    key = hashlib.sha256(os.fsencode(source.resolve()))
    for file in files:
        status = file.stat()
        key.update(os.fsencode(file))
        key.update(f"\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    cache.mkdir(parents=True, exist_ok=True)
    index = cache / f"{key.hexdigest()}.index"
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not index.exists() or not (cache / index.read_text()).exists():
            _write(source, files, cache, index)
    return Tokens(cache / index.read_text())


def _text_files(folder: Path, suffix: str) -> Iterator[Path]:
    """Sorted by path; packages installed beneath the standard library are not part of it."""
    for parent, folders, names in os.walk(folder):
        skipped = {"site-packages", "dist-packages", "__pycache__"}
        folders[:] = sorted(name for name in folders if name not in skipped and name[0] != ".")
        for name in sorted(names):
            path = Path(parent, name)
            if name.endswith(suffix) and name[0] != "." and path.is_file():
                yield path


def _write(source: Path, files: list[Path], cache: Path, index: Path) -> None:
    digest, size = hashlib.sha256(), 0
    handle, temporary = tempfile.mkstemp(dir=cache)
    with os.fdopen(handle, "wb") as output:
        for file in files:
            content = file.read_bytes()
            if not content or b"\0" in content:  # not text
                continue
            for part in (content, b"\0"):
                digest.update(part)
                output.write(part)
                size += len(part)
    if not size:
        os.unlink(temporary)
        raise DataError(f"{source} has no text files")
    name = f"{digest.hexdigest()}.tokens"
    os.replace(temporary, cache / name)
    handle, temporary = tempfile.mkstemp(dir=cache)
    with os.fdopen(handle, "w") as output:
        output.write(name)
    os.replace(temporary, index)
