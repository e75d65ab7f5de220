"""A limit to how long a call of the job's store waits for its answer.

torch waits for ever: a machine that vanishes without a word never answers, nor does it hang up.
What torch offers, `set_timeout`, ends the wait for a key that nobody sets, but not the wait for the
answer to a `check`, an `add` or a `set`. The operating system ends these.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from heteropp.runtime.ranks.hung_launcher import end_if_hung

TCP_RTO_MAX_MS = 44  # Linux 6.15; Python has no name for it


class StoreSilentError(RuntimeError):
    """The job's store is lost; the message says on which machine it was, and how it ended."""


@contextmanager
def naming_silent_store(host: str, limit_s: float) -> Iterator[None]:
    """Raises StoreSilentError where the store, on `host`, is lost in the block's calls.

    torchrun, which started this process, is ended if it hangs in calls of that store as well.
    """
    asked_s = time.monotonic()
    try:
        yield
    except dist.DistNetworkError:
        waited_s = time.monotonic() - asked_s
        is_silent = waited_s > limit_s / 2
        if is_silent:
            end_if_hung(os.getppid())
        how = f"has not answered for {limit_s:g} s" if is_silent else "has hung up"
        raise StoreSilentError(f"{host}, the machine of the job's store, {how}") from None


def limit_answers(store: dist.Store, limit_s: float) -> None:
    """Calls of all of this process's connections to the store raise DistNetworkError in time.

    The connection cannot be used any more then: the answer may still come. After an outage of the
    network that was shorter they go on soon.
    """
    # what is lost on the way is sent again so soon; the kernel gives up after 15 repeats
    pause_ms = min(max(int(1000 * limit_s / 6), 1000), 120_000)
    limit = struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6))
    for connection in _connections(store):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        with suppress(OSError):  # of an older kernel, whose pauses double
            connection.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, pause_ms)


def is_here(store: dist.Store) -> bool:
    """Whether the store is on this machine."""
    for connection in _connections(store):
        return connection.getsockname()[0] == connection.getpeername()[0]
    return True  # it is not reached over a network


def _connections(store: dist.Store) -> Iterator[socket.socket]:
    """Yields the store's connections from among this process's files, as torch has no way to."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it is not connected, or another thread has closed it
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                is_inet = connection.family in (socket.AF_INET, socket.AF_INET6)
                if is_inet and connection.getpeername()[1] == store.port:
                    yield connection
