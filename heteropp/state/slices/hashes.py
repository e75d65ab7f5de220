"""The two hashes by which damage to what was kept is found.

A checkpoint is kept for long and is copied about: each of its files has a SHA-256, which a reader
checks before it believes any of the file, and which other tools know, too.

Of a snapshot each tensor has a CRC-32, which zlib computes at 4 GB/s and more: twice SHA-256 with
the host's help, and there may be a snapshot every step. A recovery reads the tensors that it lacks,
and no whole files, so that a file's hash would tell it nothing. The checksum is there to find what
is torn or decayed, not what is forged: whoever writes into a job's folders can write manifests too.
Sizes and offsets are compared besides.

Both are part of formats of files, which do not change.
"""

from __future__ import annotations

import hashlib
import zlib
from io import BufferedReader


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def sha256_of(file: BufferedReader) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()


def checksum(content: bytes | memoryview) -> int:
    """Returns the CRC-32 of a snapshot's tensor, or of what else is short-lived."""
    return zlib.crc32(content)
