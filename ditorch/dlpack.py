"""DLPack, whose consumers cannot read a chip's memory: a copy in host memory, where one is asked.

    numpy.from_dlpack(x, device="cpu")

Without `device="cpu"` the consumer expects the producer's own memory, and hears a sentence.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.dlpack import DLDeviceType


def accept(device: torch.device) -> None:
    """Teaches torch.Tensor's DLPack methods the device that ditorch has made."""
    export, where = torch.Tensor.__dlpack__, torch.Tensor.__dlpack_device__

    @functools.wraps(export)
    def __dlpack__(self: torch.Tensor, *, dl_device: Any = None, copy: Any = None, **named: Any):  # type: ignore[no-untyped-def]
        if self.device.type != device.type:
            return export(self, dl_device=dl_device, copy=copy, **named)
        if dl_device is None or dl_device[0] != DLDeviceType.kDLCPU or copy is False:
            raise BufferError(
                f"DLPack hands over memory that its consumer reads, and no consumer reads that of "
                f'{self.device}: pass device="cpu" to from_dlpack, or tensor.cpu(), for a copy'
            )
        return export(self.cpu())

    @functools.wraps(where)
    def __dlpack_device__(self: torch.Tensor) -> tuple[Any, int]:
        if self.device.type != device.type:
            return where(self)
        return DLDeviceType.kDLExtDev, self.device.index

    torch.Tensor.__dlpack__ = __dlpack__  # type: ignore[method-assign, assignment]
    torch.Tensor.__dlpack_device__ = __dlpack_device__  # type: ignore[method-assign, assignment]
