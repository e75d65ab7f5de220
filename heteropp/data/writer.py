"""Writes a token file as documents come; it appears whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from heteropp.data.token_file import DTYPES, FORMAT, VERSION
from heteropp.data.tokenizer import Encoded, Tokenizer
from heteropp.description.files import FileError, make_folder
from hyperhetero.output import held, keep_permissions, target_of

HEADER_BYTES = 1024  # kept free at the front: what it says is known at the end
ALIGNMENT_BYTES = 8  # of the ends, which are searched where they lie


class TokenWriter:
    def __init__(self, path: Path, file: IO[bytes], tokenizer: Tokenizer) -> None:
        self.path, self.file, self.tokenizer = path, file, tokenizer
        self.dtype = next(
            name for name, dtype in DTYPES.items() if tokenizer.vocabulary <= 256**dtype.itemsize
        )
        self.ends = array("q")
        self.answers = array("q")  # begins and ends in turn
        self.tokens = self.targets = 0
        self.digest = hashlib.sha256()
        file.seek(HEADER_BYTES)

    def append(self, document: Encoded) -> None:
        """Adds a document, unless it has no token."""
        if not len(document.tokens):
            return
        self._write(document.tokens.astype(DTYPES[self.dtype], copy=False).tobytes())
        if document.answers is None:
            self.targets += len(document.tokens) - 1
        else:
            self.answers.extend((self.tokens + document.answers).flatten().tolist())
            self.targets += int(np.diff(document.answers).sum())
        self.tokens += len(document.tokens)
        self.ends.append(self.tokens)

    def finish(self) -> None:
        """Writes where the documents end and the answers lie, and the header."""
        width = DTYPES[self.dtype].itemsize
        padding = -self.tokens * width % ALIGNMENT_BYTES
        self._write(bytes(padding))
        self._write(self.ends.tobytes())
        self._write(self.answers.tobytes())
        middle = self.tokens * width + padding
        end = middle + len(self.ends) * self.ends.itemsize
        tensors = {
            "tokens": _tensor(self.dtype, (middle // width,), 0, middle),
            "documents": _tensor("I64", (len(self.ends),), middle, end),
        }
        if self.answers:
            last = end + len(self.answers) * self.answers.itemsize
            tensors["answers"] = _tensor("I64", (len(self.answers) // 2, 2), end, last)
        header = {
            "__metadata__": {
                "format": FORMAT,
                "version": VERSION,
                "tokenizer": self.tokenizer.name,
                "tokenizer_sha256": self.tokenizer.sha256,
                "vocabulary": str(self.tokenizer.vocabulary),
                "sha256": self.sha256,
            },
            **tensors,
        }
        text = json.dumps(header).encode().ljust(HEADER_BYTES - 8)
        self.file.seek(0)
        self.file.write(len(text).to_bytes(8, "little") + text)
        self.file.flush()
        os.fsync(self.file.fileno())

    @property
    def sha256(self) -> str:
        return self.digest.hexdigest()

    def _write(self, content: bytes) -> None:
        self.file.write(content)
        self.digest.update(content)


@contextmanager
def token_writer(path: Path, tokenizer: Tokenizer) -> Iterator[TokenWriter]:
    """Gives the file, which the block must finish, its name when that ends without an error.

    What a killed run left is written over by the next one. Raises FileError, and LockError where
    another process writes the file.
    """
    if path.is_dir():
        raise FileError(f"{path} is a folder; expected the name of a file to write")
    make_folder(path.parent)
    try:
        target = target_of(path)
        partial = target.with_name(f".{target.name}.partial")
        with held(target.with_name(f".{target.name}.lock"), str(path)):
            try:
                with partial.open("w+b") as file:
                    yield TokenWriter(path, file, tokenizer)
                keep_permissions(partial, target)
                partial.replace(target)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror}") from None


def _tensor(dtype: str, shape: tuple[int, ...], first: int, last: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}
