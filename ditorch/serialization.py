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

_PRIORITY = 5  # torch's own start at 10; torch cannot register two of the same
_honest: dict[str, torch.device] = {}


def accept_map_location(name: str, device: torch.device) -> None:
    """Makes torch.load(map_location=`name`) mean `device`, and files that say `name` go there."""
    if not _honest:
        torch.serialization.register_package(_PRIORITY, lambda storage: None, _restore)
    _honest[name] = device
    if device.type == "cpu":
        _honest["cpu"] = device  # as "cpu:0", which is what "device:0" reads as


def _restore(storage: Any, location: str) -> Any:
    name, _, index = location.partition(":")
    device = _honest.get(name)
    if device is None or location == str(device):
        return None
    indexed = index and device.type != "cpu"
    honest = torch.device(device.type, int(index)) if indexed else device
    return torch.serialization.default_restore_location(storage, str(honest))


def send_through_multiprocessing(device_type: str) -> None:
    """Lets torch.multiprocessing queues, pipes and spawn arguments carry the device's tensors."""

    def reduce_storage(storage: torch.UntypedStorage) -> Any:
        if storage.device.type != device_type:
            return reductions.reduce_storage(storage)
        return _receive, (storage.cpu(), str(storage.device))

    ForkingPickler.register(torch.UntypedStorage, reduce_storage)


def _receive(host: torch.UntypedStorage, device: str) -> torch.UntypedStorage:
    return host.to(device=torch.device(device))
