"""One device name over every vendor's chip.

After `import ditorch` the string "device" is accepted wherever PyTorch takes a device, and means
this process's chip (H2 paper, section 3.1, "DiTorch"):

    import torch, ditorch
    x = torch.randn(4, 4, device="device")
    y = x + x

Tensors report their honest device: "emuchip:0" for an emulated chip (DITORCH_CHIP=b-mini), "cuda:0"
for a GPU, "cpu" on a machine without accelerators. One process drives one chip of one vendor.

Importing it raises ImportError, in one sentence, if the chip that was asked for is not there;
`python -m ditorch` shows what was found, what was not, and why.
"""

from __future__ import annotations

import atexit
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from ditorch.command import is_the_command, refuse, say_plainly

if sys.platform != "linux":
    refuse(f"ditorch runs on Linux only, not on {sys.platform}")
try:
    import ditorch._ditorch as _ditorch
except ImportError as error:
    refuse(f"ditorch's C++ part does not load ({error}); build ditorch again")

from ditorch import (
    clients,
    device_names,
    dlpack,
    process_groups,
    safetensors_devices,
    serialization,
    soft_cap,
    strict,
)
from ditorch.memory_registration import PeerHandle, peer_handle
from ditorch.vendors import Choice, adopted, choose_vendor, quirks

__all__ = [
    "Chip",
    "Pacing",
    "PeerHandle",
    "chip",
    "device",
    "device_clock",
    "enable",
    "end_step",
    "fallback_counts",
    "is_emulated",
    "kernel_counts",
    "pacing",
    "pacing_reset",
    "peer_handle",
    "reset_fallback_counts",
    "vendor",
    "watch_memory",
]

device: torch.device
"""The honest device of this process."""

_choice: Choice


@dataclass(frozen=True)
class Chip:
    """The chip behind the device."""

    vendor: str
    chip_type: str
    memory_bytes: int | None  # None: the plugin of an adopted device does not say


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
    """The name of the vendor support in use: "emuchip", "cuda", "npu", "cpu" ..."""
    return _choice.name


def enable(*, cuda_compat: bool) -> None:
    """Turns ditorch's optional behaviour on, for the rest of the process.

    cuda_compat: a script that hard-codes "cuda" and torch.cuda runs on this process's device, as
        DITORCH_CUDA_COMPAT=1 would have it; `ditorch.cuda_compat` says what that means.
    """
    if not cuda_compat:
        raise ValueError("ditorch.enable has nothing to enable; cuda_compat cannot be taken back")
    from ditorch import cuda_compat as compat

    compat.enable(device)


def chip() -> Chip:
    """The vendor, type and memory capacity of this process's chip."""
    if _is_made_here():
        found = _ditorch.properties(device.index)
        return Chip(found["vendor"], found["chip_type"], found["memory_bytes"])
    if device.type == "cpu":
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Chip("cpu", platform.machine(), memory_bytes)
    chip_type = adopted.chip_type(device)
    return Chip(_choice.look.name or _choice.vendor.maker, chip_type, adopted.memory_bytes(device))


def is_emulated() -> bool:
    """Whether time on this device is emulated: its figures are then only as good as `pacing`."""
    return pacing() is not None


def fallback_counts() -> dict[str, int]:
    """How often the host computed each operator because the chip has no kernel for it."""
    return _ditorch.fallback_counts()


def reset_fallback_counts() -> None:
    """Sets the counts that `fallback_counts` returns to zero."""
    _ditorch.reset_fallback_counts()


def kernel_counts() -> dict[str, int]:
    """How often the chip's own kernel computed each operator since ditorch was imported."""
    return _ditorch.kernel_counts()


def has_fused_attention(
    apart: bool = False,
    dtype: torch.dtype = torch.float32,
    size: int = 16,
    value_size: int = 16,
    *,
    capped: bool = False,
    dropout: bool = False,
) -> bool:
    """Whether attention is one kernel on this device, which keeps no scores.

    apart: as FlashAttention, through windows and in documents that lie one after the other, and
        not as scaled_dot_product_attention of whole sequences alone. Where the chip's vendor has no
        kernel for it, the host computes that; the other is composed of products and a softmax.
    size: of a head's queries and keys; value_size: of its values. Kernels of ours take them all.
    capped: with a soft cap (`ditorch.soft_cap`), which only chips that ditorch drives have.
    dropout: with dropout.
    """
    if _is_made_here():
        return _ditorch.has_attention(apart, capped, dropout)
    if capped:
        return False
    share = 0.5 if dropout else 0.0
    query, value = (
        torch.zeros(1, 16, 1, each, device=device, dtype=dtype) for each in (size, value_size)
    )
    try:
        if apart:
            torch.ops.aten._flash_attention_forward(
                *(query, query, value, None, None, 16, 16, share, True, False), window_size_left=1
            )
            return device.type != "cpu"  # whose kernel is ours, and for precision tools
        query, value = query.transpose(1, 2), value.transpose(1, 2)
        chosen = torch._fused_sdp_choice(query, query, value, None, share, is_causal=True)
    except RuntimeError:  # a plugin that has none, or knows of no choice
        return False
    return chosen != torch.nn.attention.SDPBackend.MATH.value


def pacing() -> Pacing | None:
    """The account of emulated time, or None on real hardware."""
    if not _is_made_here():
        return None
    account = _ditorch.pacing(device.index)
    return None if account is None else Pacing(*account)


def pacing_reset() -> None:
    """Starts the account of emulated time afresh; does nothing on real hardware."""
    if _is_made_here():
        _ditorch.pacing_reset(device.index)


def device_clock() -> tuple[str, int, int] | None:
    """The clock of an emulated chip, for transports: (device type, ready_at_ns, wait_until_ns).

    The last two are addresses of C functions that act on the calling thread's current stream:
    `int64_t ready_at_ns(int32_t device)` and `void wait_until_ns(int32_t device, int64_t ns)`, in
    CLOCK_MONOTONIC nanoseconds. None on real hardware, where transports use events.
    """
    if not _is_made_here():
        return None
    clock = _ditorch.device_clock()
    return None if clock is None else (device.type, *clock)


def watch_memory(taken: int, returned: int) -> None:
    """Tells a transport which memory the chip's allocator holds, so that it may register it once.

    Args:
        taken: address of a C function `void f(int32_t device, uint64_t address, uint64_t bytes)`,
            called for every block that is held now, and for each that is taken later.
        returned: address of another, called before the chip gets a block back.

    Does nothing where the allocator is another's: an adopted vendor's, or the host's.
    """
    if _is_made_here():
        _ditorch.watch_memory(taken, returned)


def host_reaches_memory() -> bool:
    """Whether the host may read and write the chip's memory through the chip's own pointers.

    Where it may not, transports copy through host memory, or their network card reads the chip's.
    """
    if _is_made_here():
        return bool(_ditorch.properties(device.index)["host_accessible"])
    return device.type == "cpu"


def vendor_library() -> str | None:
    """Path of the vendor's library that ditorch made this device from; None for a plugin's."""
    library = _choice.look.library
    return None if library is None else str(library)


def end_step() -> None:
    """Tells the precision tools, if any are open, that a training step is over.

    Only for programs whose optimizer is not a torch.optim.Optimizer: the steps of those are seen.
    """
    if place := sys.modules.get("ditorch.precision.place"):
        place.next_step()


def _let_autograd_rest() -> None:
    """Runs as Python exits: autograd's thread may still hold Python objects that it releases.

    Python, once it ends, stops threads that ask for its lock, and C++ answers with std::terminate.
    """
    threads = Path("/proc/self/task").iterdir()
    if any(_thread_name(thread).startswith("pt_autograd") for thread in threads):
        deadline_s = 5.0
        _ditorch.let_autograd_rest(device, deadline_s)


def _thread_name(thread: Path) -> str:
    try:
        return (thread / "comm").read_text()
    except OSError:  # the thread has just ended
        return ""


def _make_device(library: str, advice: str) -> str:
    """Gives torch the device of a vendor's library; returns its honest type.

    advice: half a sentence for whoever has no chip that the library can drive, or "".
    """
    if (taken := torch._C._get_privateuse1_backend_name()) != "privateuseone":
        raise ImportError(
            f"the device {taken!r} already has torch's place for a vendor's device, so ditorch "
            f"cannot load {library}; a process has one of them, and "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from importing plugins by itself"
        )
    try:
        _ditorch.load(library)
    except RuntimeError as error:
        raise ImportError("; ".join(filter(None, (str(error).splitlines()[0], advice)))) from None
    device_type: str = _ditorch.properties(0)["library"]
    from ditorch import device_module

    torch.utils.rename_privateuse1_backend(device_type)
    torch._register_device_module(device_type, device_module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    torch.set_autocast_dtype(device_type, torch.bfloat16)
    serialization.send_through_multiprocessing(device_type)
    dlpack.accept(torch.device(device_type))
    process_groups.accept(device_type)
    soft_cap.register()
    atexit.register(_let_autograd_rest)
    return device_type


def _is_made_here() -> bool:
    """Whether the device is ditorch's own, made from a vendor's library."""
    return _choice.look.library is not None


def start() -> None:
    """Finds the chip and teaches torch its unified name; `import ditorch` has done it.

    Raises ImportError, in one sentence, if the chip that was asked for is not there.
    """
    global device, _choice
    _choice = choose_vendor()
    look = _choice.look
    if look.library is not None:
        device = torch.device(_make_device(str(look.library), _choice.vendor.advice), 0)
    elif look.device_type == "cpu":
        device = torch.device("cpu")
    else:
        device = torch.device(look.device_type, adopted.current_index(look.device_type))
        if _choice.vendor.has_quirks():
            quirks.handle(device.type, _choice.vendor.quirks)
    _ditorch.unify_device_name(device.type)
    device_names.accept("device", device)
    serialization.accept_map_location("device", device)
    safetensors_devices.accept(device)
    if _is_made_here():
        clients.teach(device)
    wanted = os.environ.get("DITORCH_CUDA_COMPAT", "0")
    if wanted not in ("0", "1"):
        raise ImportError(f"DITORCH_CUDA_COMPAT is {wanted!r}, expected 0 or 1")
    if wanted == "1":
        enable(cuda_compat=True)
    strict.follow_environment(is_made_here=_is_made_here())


def _open_configured_tools() -> None:
    """The precision tools that ditorch.toml or the environment ask for; most programs have none."""
    named = os.environ.get("DITORCH_PRECISION") or os.environ.get("DITORCH_CONFIG")
    if not named and not Path("ditorch.toml").is_file():
        return
    from ditorch.precision.settings import open_configured_tools

    try:
        open_configured_tools()
    except ValueError as error:
        raise ImportError(str(error)) from None


if "ditorch.chips" in sys.modules:  # read before the chip was opened, as planners do
    from ditorch import chips  # noqa: F401

if not is_the_command():  # which starts by itself, so that it can show what fails
    try:
        start()
        _open_configured_tools()
    except ImportError as error:
        say_plainly(error)
        raise
