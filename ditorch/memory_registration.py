"""How a NIC reaches a tensor's memory on the chip: what device-direct transports register."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ditorch import _ditorch

_KINDS: tuple[Literal["host_pointer"], Literal["dmabuf"]] = ("host_pointer", "dmabuf")


@dataclass(frozen=True)
class PeerHandle:
    """The memory of one tensor, as a NIC's driver registers it; good while the tensor lives."""

    kind: Literal["host_pointer", "dmabuf"]
    address: int  # what to register; dmabuf: the address within the device
    size_bytes: int
    fd: int  # dmabuf: the caller's own, to be closed once the memory is registered; else -1
    offset_bytes: int  # dmabuf: where the memory begins in the buffer; else 0


def peer_handle(tensor: torch.Tensor) -> PeerHandle | None:
    """The handle of a contiguous tensor's memory, or None if no NIC reaches it.

    CPU tensors are plain host pointers. Devices that ditorch adopts have no handle yet.

    Raises:
        ValueError: the tensor is not contiguous, or is empty.
    """
    if not tensor.is_contiguous() or tensor.numel() == 0:
        raise ValueError(
            f"a peer handle is of one piece of memory, but the tensor of shape "
            f"{tuple(tensor.shape)} and strides {tensor.stride()} is not"
        )
    address, size_bytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    if tensor.is_cpu:
        return PeerHandle("host_pointer", address, size_bytes, -1, 0)
    if tensor.device.type != torch._C._get_privateuse1_backend_name() or not _ditorch.is_loaded():
        return None
    found = _ditorch.peer_handle(tensor.device.index, address, size_bytes)
    if found is None:
        return None
    kind, address, fd, offset_bytes = found
    return PeerHandle(_KINDS[kind], address, size_bytes, fd, offset_bytes)
