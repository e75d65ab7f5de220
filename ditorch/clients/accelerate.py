"""accelerate: the device of a process, its process group, and float16 with a gradient scaler."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from ditorch.clients import tables
from ditorch.process_groups import backend_of


def teach_state(module: Any, device: torch.device) -> None:
    """PartialState, which knows the device of this process and how many processes there are."""
    state = module.PartialState
    default_device, prepare, set_device = (
        state.default_device.fget,
        state._prepare_backend,
        state.set_device,
    )

    def chosen(self: Any) -> torch.device:
        found: torch.device = default_device(self)
        return torch.device(device) if found.type == "cpu" else found

    @functools.wraps(prepare)
    def prepare_backend(self: Any, cpu: bool = False, *rest: Any, **named: Any) -> Any:
        backend, kind = prepare(self, cpu, *rest, **named)
        of_ranks = int(os.environ.get("LOCAL_RANK", -1)) != -1 and not cpu
        if of_ranks and (kind == module.DistributedType.NO or backend == "nccl"):
            return backend_of(device.type), module.DistributedType.MULTI_GPU
        return backend, kind

    @functools.wraps(set_device)
    def set_device_of_rank(self: Any) -> None:
        if self.device is None and self.distributed_type == module.DistributedType.MULTI_GPU:
            count = torch.accelerator.device_count()
            self.device = torch.device(device.type, self.local_process_index % count)
            torch.accelerator.set_device_index(self.device.index)
        set_device(self)

    state.default_device = property(chosen)
    state._prepare_backend = prepare_backend
    state.set_device = set_device_of_rank


def teach_accelerator(module: Any, device: torch.device) -> None:
    """Accelerator(mixed_precision="fp16"), whose scaler would be CUDA's."""
    tables.add(module.Accelerator.__init__, "cuda", device.type)
    get_scaler = module.get_grad_scaler

    @functools.wraps(get_scaler)
    def get_grad_scaler(distributed_type: Any = None, **named: Any) -> Any:
        if distributed_type == module.DistributedType.FSDP:
            return get_scaler(distributed_type, **named)
        return torch.amp.GradScaler(device.type, **named)  # type: ignore[attr-defined]

    module.get_grad_scaler = get_grad_scaler
