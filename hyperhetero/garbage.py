"""When Python collects garbage: each collection looks through much of what a process holds.

Where many objects are made that live on, and next to no cycles, that takes a third of the time and
frees nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock, get_ident

_lock = RLock()
_wishes: dict[int, list[bool]] = {}  # of the threads that have any, the newest last
_before = True  # whether garbage was collected when no thread had any


@contextmanager
def collecting(wanted: bool) -> Iterator[None]:
    """Collects garbage inside, or collects none, and afterwards as before.

    It is the whole process's affair: where threads wish for both, garbage is collected.
    """
    global _before
    thread = get_ident()
    with _lock:
        if not _wishes:
            _before = gc.isenabled()
        _wishes.setdefault(thread, []).append(wanted)
        _follow()
    try:
        yield
    finally:
        with _lock:
            _wishes[thread].pop()
            if not _wishes[thread]:
                del _wishes[thread]
            _follow()


def _follow() -> None:
    collects = any(wishes[-1] for wishes in _wishes.values()) if _wishes else _before
    if collects:
        gc.enable()
    else:
        gc.disable()
