"""One device name over every vendor's chip.

After `import ditorch` the string "device" is accepted wherever PyTorch takes a device, and means
this process's chip (H2 paper, section 3.1, "DiTorch"):

    import torch, ditorch
    x = torch.randn(4, 4, device="device")
    y = x + x

Tensors report their honest device: "emuchip:0" for an emulated chip (DITORCH_CHIP=b-mini), "cuda:0"
for a GPU, "cpu" on a machine without accelerators. One process drives one chip of one vendor.

Importing it raises ImportError, in one sentence, if the chip that was asked for is not there.
"""

from __future__ import annotations

import atexit
import os
import platform
import sys
import time
from dataclasses import dataclass

import torch

try:
    import ditorch._ditorch as _ditorch
except ImportError as error:
    raise ImportError(f"ditorch's C++ part does not load ({error}); build ditorch again") from None

from ditorch import moving
from ditorch.vendors import Vendor, find_vendor

__all__ = [
    "Chip",
    "Pacing",
    "chip",
    "device",
    "device_clock",
    "fallback_counts",
    "is_emulated",
    "pacing",
    "pacing_reset",
    "reset_fallback_counts",
    "vendor",
]

device: torch.device
"""The honest device of this process."""

_vendor: Vendor


@dataclass(frozen=True)
class Chip:
    """The chip behind the device."""

    vendor: str
    chip_type: str
    memory_bytes: int


@dataclass(frozen=True)
class Pacing:
    """How well the host kept up with an emulated chip since the last `pacing_reset`."""

    elapsed_s: float  # emulated time
    busy_s: float  # of it, time in which the chip had work
    lost_s: float  # of it, time added because the host was slower than the chip

    @property
    def fidelity(self) -> float:
        """The share of emulated time that is the chip's own: 1 is perfect."""
        return 1.0 - self.lost_s / self.elapsed_s if self.elapsed_s > 0 else 1.0


def vendor() -> str:
    """The name of the vendor support in use: "emuchip", "cuda" or "cpu"."""
    return _vendor.name


def chip() -> Chip:
    """The vendor, type and memory capacity of this process's chip."""
    if _vendor.library is not None:
        found = _ditorch.properties(device.index)
        return Chip(found["vendor"], found["chip_type"], found["memory_bytes"])
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        maker = "AMD" if torch.version.hip else "NVIDIA"
        return Chip(maker, gpu.name, gpu.total_memory)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Chip("cpu", platform.machine(), memory_bytes)


def is_emulated() -> bool:
    """Whether time on this device is emulated: its figures are then only as good as `pacing`."""
    return pacing() is not None


def fallback_counts() -> dict[str, int]:
    """How often the host computed each operator because the chip has no kernel for it."""
    return _ditorch.fallback_counts()


def reset_fallback_counts() -> None:
    _ditorch.reset_fallback_counts()


def pacing() -> Pacing | None:
    """The account of emulated time, or None on real hardware."""
    if _vendor.library is None:
        return None
    account = _ditorch.pacing(device.index)
    return None if account is None else Pacing(*account)


def pacing_reset() -> None:
    """Starts the account of emulated time afresh; does nothing on real hardware."""
    if _vendor.library is not None:
        _ditorch.pacing_reset(device.index)


def device_clock() -> tuple[str, int, int] | None:
    """The clock of an emulated chip, for transports: (device type, ready_at_ns, wait_until_ns).

    The last two are addresses of C functions that act on the calling thread's current stream:
    `int64_t ready_at_ns(int32_t device)` and `void wait_until_ns(int32_t device, int64_t ns)`, in
    CLOCK_MONOTONIC nanoseconds. None on real hardware, where transports use events.
    """
    if _vendor.library is None:
        return None
    clock = _ditorch.device_clock()
    return None if clock is None else (device.type, *clock)


def _let_autograd_rest() -> None:
    """Runs as Python exits.

    Autograd's thread for the device may still release Python objects after backward has returned.
    Python, once it ends, stops threads that ask for its lock, and C++ answers with std::terminate.
    """
    time.sleep(0.05)


def _make_device(library: str) -> str:
    """Gives torch the device of a vendor's library; returns its honest type."""
    if (taken := torch._C._get_privateuse1_backend_name()) != "privateuseone":
        raise ImportError(
            f"the device {taken!r} already has torch's place for a vendor's device, so ditorch "
            f"cannot load {library}; import only one of them in a process"
        )
    try:
        _ditorch.load(library)
    except RuntimeError as error:
        raise ImportError(str(error).splitlines()[0]) from None
    device_type: str = _ditorch.properties(0)["library"]
    from ditorch import device_module

    torch.utils.rename_privateuse1_backend(device_type)
    torch._register_device_module(device_type, device_module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    torch.set_autocast_dtype(device_type, torch.bfloat16)
    moving.send_through_multiprocessing(device_type)
    atexit.register(_let_autograd_rest)
    return device_type


def _start() -> None:
    global device, _vendor
    _vendor = find_vendor()
    if _vendor.library is not None:
        device = torch.device(_make_device(str(_vendor.library)), 0)
    elif _vendor.device_type == "cpu":
        device = torch.device("cpu")
    else:
        device = torch.device(
            _vendor.device_type or "cpu", torch.accelerator.current_device_index()
        )
    _ditorch.unify_device_name(device.type)
    moving.accept_unified_map_location(device)


if sys.platform != "linux":
    raise ImportError(f"ditorch runs on Linux only, not on {sys.platform}")
_start()
