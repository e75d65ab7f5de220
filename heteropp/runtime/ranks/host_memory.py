"""The host's own allocator, told to keep what a step frees: the next step asks for it again."""

from __future__ import annotations

import ctypes

# the parameters of glibc's mallopt, and the largest value that it takes for each
TRIM_THRESHOLD, TRIM_BYTES = -1, (1 << 31) - 1
MMAP_THRESHOLD, MMAP_BYTES = -3, 32 << 20


def keep_freed_memory() -> None:
    """Makes this process keep the memory that it frees from now on.

    Otherwise glibc gives large tensors back to the kernel, and every page of the next ones is
    cleared and mapped anew, which takes up to a tenth of a step. Another libc is left as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, MMAP_BYTES)
        mallopt(TRIM_THRESHOLD, TRIM_BYTES)
