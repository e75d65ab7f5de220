"""Messages between chips of different vendors.

This module is libdicomm's point-to-point core and needs no torch; `dicomm.distributed` is the
torch.distributed backend.

    communicator = dicomm.Communicator(rank, world_size, dicomm.FileStore(folder), secret=secret)
    communicator.send(array, peer=1, tag=7)

Errors derive from `dicomm.Error`: `TimeoutError` (also a builtin TimeoutError), `PeerError` (a
peer died, left or aborted; also a ConnectionError) and `AbortedError` (this rank aborted or
closed).

A process that a rank forks, a data loader's worker say, has no part in the rank's connections: it
closes them at once, and using the rank's communicator there is an `Error`. It may make its own.
"""

from typing import Any

from dicomm._dicomm import (
    ANY_SOURCE,
    AbortedError,
    Communicator,
    Error,
    PeerError,
    Request,
    TimeoutError,
)
from dicomm.store import FileStore, Store, TorchStore

__all__ = [
    "ANY_SOURCE",
    "AbortedError",
    "Communicator",
    "Error",
    "FileStore",
    "PeerError",
    "Request",
    "Store",
    "TimeoutError",
    "TorchStore",
]

_NEEDS_TORCH = (
    "Options",
    "bytes_sent",
    "monitored_barrier",
    "register_backend",
    "set_device_clock",
    "set_links",
    "share_chip_memory",
)


def __getattr__(name: str) -> Any:
    """dicomm.distributed's functions, imported with torch when first asked for."""
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module 'dicomm' has no attribute {name!r}")
    from dicomm import distributed

    return getattr(distributed, name)
