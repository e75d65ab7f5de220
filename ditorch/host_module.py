"""What torch expects of `torch.<device type>`, answered for the host, where it is the device.

torch.cpu has no memory, random state or timed events; a script written for torch.cuda needs them.
"""

from __future__ import annotations

import ctypes
import os
import platform
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from ditorch.memory_table import memory_table

_Device = torch.device | str | int | None


def check(device: _Device) -> None:
    """The host is one device: a script that asks for another must hear it."""
    index = device if isinstance(device, int) else torch.device(device or "cpu").index
    if index not in (None, -1, 0):
        raise RuntimeError(f"the host is one device, number 0; there is no device {device}")


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    """The host is always ready."""


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device: _Device) -> None:
    check(device)


def synchronize(device: _Device = None) -> None:
    """The host has done all work when a call returns."""
    check(device)


class device(AbstractContextManager[None]):
    """The host stays the current device; another index is an error."""

    def __init__(self, device: _Device) -> None:
        check(device)

    def __exit__(self, *_: object) -> None:
        return None


class Stream(AbstractContextManager["Stream"]):
    """The host's one order of work, under as many names as a script likes."""

    def __init__(self, device: _Device = None, priority: int = 0, **_: object) -> None:
        check(device)
        self.device = torch.device("cpu")
        self.priority = priority

    def __exit__(self, *_: object) -> None:
        return None

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Work is done when a call returns."""

    def wait_stream(self, stream: Stream) -> None:
        """Does nothing: the work of a stream is done when a call returns."""

    def wait_event(self, event: Event) -> None:
        """Does nothing: an event has happened once it is recorded."""

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class Event:
    """A point in the host's time."""

    def __init__(self, enable_timing: bool = False, **_: object) -> None:
        self._enable_timing = enable_timing
        self._at_ns = 0

    def record(self, stream: Stream | None = None) -> None:
        self._at_ns = time.perf_counter_ns()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Does nothing: the event has happened."""

    def wait(self, stream: Stream | None = None) -> None:
        """Does nothing: the event has happened."""

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to `end`."""
        if not (self._enable_timing and end._enable_timing):
            raise ValueError("both events must be made with enable_timing=True")
        if not (self._at_ns and end._at_ns):
            raise RuntimeError("both events must be recorded before the time between them is asked")
        return (end._at_ns - self._at_ns) / 1e6


_the_stream = Stream()


def current_stream(device: _Device = None) -> Stream:
    check(device)
    return _the_stream


default_stream = current_stream


def stream(stream: Stream) -> Stream:
    return stream


def set_stream(stream: Stream) -> None:
    """All the host's streams are one."""


def get_device_name(device: _Device = None) -> str:
    check(device)
    return f"cpu {platform.machine()}"


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    """(free, total) bytes of the machine."""
    check(device)
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page_bytes, os.sysconf("SC_PHYS_PAGES") * page_bytes


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def memory_allocated(device: _Device = None) -> int:
    """Bytes of this process in memory: torch does not count its own tensors on the host."""
    check(device)
    return _status_bytes("VmRSS:")


def max_memory_allocated(device: _Device = None) -> int:
    check(device)
    return _status_bytes("VmHWM:")


memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated


def memory_stats(device: _Device = None) -> dict[str, Any]:
    current, peak = memory_allocated(device), max_memory_allocated(device)
    return {
        f"{kind}_bytes.all.{key}": value
        for kind in ("allocated", "reserved")
        for key, value in (("current", current), ("peak", peak))
    }


def memory_summary(device: _Device = None, abbreviated: bool = False) -> str:
    """Bytes in use, for people to read; `abbreviated` is CUDA's, and changes nothing."""
    return memory_table(
        memory_allocated(device),
        max_memory_allocated(device),
        memory_reserved(device),
        max_memory_reserved(device),
    )


def reset_peak_memory_stats(device: _Device = None) -> None:
    check(device)
    Path("/proc/self/clear_refs").write_text("5")


def empty_cache() -> None:
    """Gives memory the C library keeps back to the system."""
    ctypes.CDLL(None).malloc_trim(0)


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def get_rng_state(device: _Device = None) -> torch.Tensor:
    """The host has one random state: torch.get_rng_state's."""
    check(device)
    return torch.default_generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: _Device = None) -> None:
    check(device)
    torch.default_generator.set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state()]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


manual_seed_all = manual_seed


def seed() -> None:
    torch.default_generator.seed()


seed_all = seed


def initial_seed() -> int:
    return torch.default_generator.initial_seed()
