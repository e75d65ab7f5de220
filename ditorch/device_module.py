"""What torch expects of `torch.<device type>`, for a device that ditorch makes.

Registered under the library's honest name, for example as `torch.emuchip`.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

import torch

from ditorch import _ditorch
from ditorch.memory_table import memory_table

Stream = torch.Stream
Event = torch.Event

empty_cache = torch.accelerator.empty_cache
memory_stats = torch.accelerator.memory_stats
memory_allocated = torch.accelerator.memory_allocated
max_memory_allocated = torch.accelerator.max_memory_allocated
memory_reserved = torch.accelerator.memory_reserved
max_memory_reserved = torch.accelerator.max_memory_reserved
reset_peak_memory_stats = torch.accelerator.reset_peak_memory_stats

_started_by = os.getpid()
_initialized = True  # torch.utils.checkpoint keeps random states of initialized devices only

_Device = torch.device | str | int | None


def _index(device: _Device) -> int:
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        device = device.index
    return current_device() if device is None else device


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    """Nothing is left to do once ditorch is imported."""


def _is_in_bad_fork() -> bool:
    """Whether a fork has cut this process off: only a chip that is the host itself survives one."""
    return os.getpid() != _started_by and not _ditorch.properties(0)["host_accessible"]


def device_count() -> int:
    return _ditorch.device_count()


def current_device() -> int:
    return _ditorch.current_device()


def set_device(device: _Device) -> None:
    _ditorch.set_device(_index(device))


class device(AbstractContextManager[None]):
    """Makes `device` the current one inside a with block; None and -1 change nothing."""

    def __init__(self, device: _Device) -> None:
        self._inside = _index(device)
        self._before = -1

    def __enter__(self) -> None:
        self._before = current_device()
        if self._inside >= 0:
            _ditorch.set_device(self._inside)

    def __exit__(self, *_: object) -> None:
        _ditorch.set_device(self._before)


def synchronize(device: _Device = None) -> None:
    """Waits until the chip has done all the work submitted so far."""
    _ditorch.synchronize(_index(device))


def current_stream(device: _Device = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream) -> torch.Stream:
    """A context in which `stream` is the current one: torch's streams are that themselves."""
    return stream


def get_device_name(device: _Device = None) -> str:
    chip = _ditorch.properties(_index(device))
    return f"{chip['vendor']} {chip['chip_type']}"


def get_device_properties(device: _Device = None) -> dict[str, Any]:
    return _ditorch.properties(_index(device))


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    """(free, total) bytes of the chip."""
    return torch.accelerator.get_memory_info(_index(device))


def memory_summary(device: _Device = None, abbreviated: bool = False) -> str:
    """Bytes in use, for people to read; `abbreviated` is CUDA's, and changes nothing."""
    return memory_table(
        memory_allocated(device),
        max_memory_allocated(device),
        memory_reserved(device),
        max_memory_reserved(device),
    )


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def _default_generator(device: _Device) -> torch.Generator:
    return _ditorch.default_generator(_index(device))


def get_rng_state(device: _Device = None) -> torch.Tensor:
    return _default_generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: _Device = None) -> None:
    _default_generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    _default_generator(None).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _default_generator(index).manual_seed(seed)


def seed() -> None:
    _default_generator(None).seed()


def initial_seed() -> int:
    return _default_generator(None).initial_seed()
