"""A process group without a backend's name: `init_process_group()`, then DDP on the chip.

torch then takes the default backend of the device, and has none for one that it does not know. An
installed distribution that has one says so by an entry point, "torch.distributed.backends"; it is
imported when a group is made with it.
"""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import torch


def accept(device_type: str) -> None:
    """Makes an installed backend the default of `device_type`."""
    if not torch.distributed.is_available():
        return
    for backend in entry_points(group="torch.distributed.backends"):
        _register(backend, device_type)
    _name_backend_of(device_type)


def backend_of(device_type: str) -> str:
    """Returns the name of the backend that serves a device; gloo, where none says that it does."""
    backends: dict[str, str] = torch.distributed.Backend.default_device_backend_map
    return backends.get(device_type, "gloo")


def _register(backend: EntryPoint, device_type: str) -> None:
    def create(base: Any, options: Any) -> Any:
        return backend.load()(base, options)

    torch.distributed.Backend.register_backend(
        backend.name, create, extended_api=True, devices=["cpu", device_type]
    )


def _name_backend_of(device_type: str) -> None:
    """A group made without a backend gets the device's by name, so with all devices it serves.

    torch itself gives such a group the device alone, without the host whose tensors checkpoints
    and collectives of objects use, and calls its backend Gloo.
    """
    c10d: Any = torch.distributed.distributed_c10d
    make_group = c10d._new_process_group_helper

    @functools.wraps(make_group)
    def make(size: int, rank: int, ranks: Any, backend: Any, *rest: Any, **named: Any) -> Any:
        if backend == c10d.Backend.UNDEFINED:
            found = c10d.Backend.default_device_backend_map.get(device_type, backend)
            backend = c10d.Backend(found)
        return make_group(size, rank, ranks, backend, *rest, **named)

    c10d._new_process_group_helper = make
