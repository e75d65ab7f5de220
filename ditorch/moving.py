"""Tensors in files and between processes.

torch.save and torch.load know any device torch can parse, except where they match its name in
Python: there the unified name is added. Storages sent through torch.multiprocessing travel in
shared host memory and land on the receiver's chip.
"""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions


def accept_unified_map_location(device: torch.device) -> None:
    """Makes torch.load(map_location="device") mean `device`."""

    def restore(storage: Any, location: str) -> Any:
        name, _, index = location.partition(":")
        if name != "device":
            return None
        indexed = index and device.type != "cpu"
        honest = torch.device(device.type, int(index)) if indexed else device
        return torch.serialization.default_restore_location(storage, str(honest))

    torch.serialization.register_package(5, lambda storage: None, restore)


def send_through_multiprocessing(device_type: str) -> None:
    """Lets torch.multiprocessing queues, pipes and spawn arguments carry the device's tensors."""

    def reduce_storage(storage: torch.UntypedStorage) -> Any:
        if storage.device.type != device_type:
            return reductions.reduce_storage(storage)
        return _receive, (storage.cpu(), str(storage.device))

    ForkingPickler.register(torch.UntypedStorage, reduce_storage)


def _receive(host: torch.UntypedStorage, device: str) -> torch.UntypedStorage:
    return host.to(device=torch.device(device))
