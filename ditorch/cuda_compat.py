"""Scripts that hard-code "cuda" and torch.cuda run on this process's device, whatever it is.

    import ditorch
    ditorch.enable(cuda_compat=True)      # or DITORCH_CUDA_COMPAT=1

"cuda" then reads as "device" wherever torch takes a device, `.cuda()` moves there, and torch.cuda
answers for it. Tensors keep their honest device: `x.device.type` is "emuchip" or "npu" and
`x.is_cuda` is False, because code that asks so is about to call a CUDA kernel.

Each public name of torch.cuda is one of:
- the name of the same meaning in the vendor's own module (`torch.npu`, `torch.emuchip`), or in
  host_module.py on the host;
- one of `_ANSWERS` below, where vendors' modules have nothing of that name;
- an error that names it: CUDA graphs, memory pools, handles of CUDA's libraries.

On the host, which torch does not count among devices with numbers, .cuda(0) and .to(0) work and
torch.ones(2, device=0) stays torch's error.

Nothing changes on a device that is called cuda already.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ditorch import _ditorch, device_names, host_module, serialization
from ditorch.vendors import adopted

_device: torch.device
_module: Any  # the vendor's counterpart of torch.cuda


def enable(device: torch.device) -> None:
    """Makes "cuda" and torch.cuda mean `device` in this process; a second call changes nothing."""
    global _device, _module
    if device.type == "cuda" or torch.Tensor.cuda is _tensor_cuda:
        return
    _device = device
    _module = host_module if device.type == "cpu" else torch.get_device_module(device)
    _ditorch.unify_cuda_name()
    device_names.accept("cuda", device)
    serialization.accept_map_location("cuda", device)
    _replace_torch_cuda()
    torch.Tensor.cuda = _tensor_cuda  # type: ignore[method-assign, assignment]
    torch.UntypedStorage.cuda = _storage_cuda  # type: ignore[method-assign, assignment]
    torch.TypedStorage.cuda = _storage_cuda  # type: ignore[method-assign, assignment]
    if device.type == "cpu":
        torch.Tensor.pin_memory = _unpinned  # type: ignore[method-assign, assignment]
        for kind in (torch.Tensor, torch.nn.Module):  # a number names an accelerator's device
            kind.to = _accept_number(kind.to)  # type: ignore[method-assign, assignment]
        torch.Tensor.record_stream = _record_stream  # type: ignore[method-assign, assignment]
        for name in ("get_rng_state", "set_rng_state"):  # torch.random.fork_rng looks for them
            setattr(torch.cpu, name, getattr(host_module, name))


def _replace_torch_cuda() -> None:
    cuda = torch.cuda
    parts = [cuda, cuda.memory, cuda.random, cuda.streams, cuda.graphs]
    for name in cuda.__all__:
        before = getattr(cuda, name, None)
        if name in _KEPT or isinstance(before, types.ModuleType) or _is_tensor_type(before):
            continue
        served = _serve(name, is_class=isinstance(before, type))
        for part in parts:
            if hasattr(part, name):
                setattr(part, name, served)
    for name in ("range_push", "range_pop", "range", "mark"):
        setattr(cuda.nvtx, name, _NVTX[name])


_KEPT = {"CudaError", "DeferredCudaCallError", "cudaStatus", "has_half", "has_magma"}


def _is_tensor_type(value: Any) -> bool:
    """torch.cuda.FloatTensor and its like; torch itself says that they cannot be made."""
    return isinstance(value, type(torch.FloatTensor)) or (
        isinstance(value, type) and issubclass(value, torch.storage._LegacyStorage)
    )


def _serve(name: str, is_class: bool) -> Any:
    if hasattr(_module, name) and name not in _ALWAYS_OURS:
        return _as_class(getattr(_module, name)) if is_class else getattr(_module, name)
    if name in _ANSWERS:
        return _as_class(_ANSWERS[name]) if is_class else _ANSWERS[name]
    refuse = _unserved(f"torch.cuda.{name}")
    return type(name, (), {"__new__": refuse}) if is_class else refuse


def _as_class(served: Any) -> type:
    """What is a class on CUDA stays one: torch.compile asks isinstance(x, torch.cuda.<name>)."""
    if isinstance(served, type):
        return served
    return type(served.__name__, (), {"__new__": lambda _, *args, **named: served(*args, **named)})


def _unserved(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            f"{name} exists only on CUDA; this process's device is {_device} and ditorch's "
            "cuda_compat has nothing to serve it with"
        )

    return refuse


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)


# Moving


def _honest(device: Any) -> torch.device:
    if _module is host_module:
        host_module.check(device)
    if device is None:
        return _device if _device.type == "cpu" else torch.device(_device.type)
    if isinstance(device, int):
        return torch.device(_device.type, device)
    return torch.device(device)


def _tensor_cuda(
    self: torch.Tensor,
    device: Any = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> torch.Tensor:
    """Moves to this process's device."""
    return self.to(_honest(device), non_blocking=non_blocking, memory_format=memory_format)


def _storage_cuda(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
    return self.to(device=_honest(device), non_blocking=non_blocking)


def _accept_number(move: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(move)
    def to(self: Any, *arguments: Any, **named: Any) -> Any:
        if arguments and isinstance(arguments[0], int):
            arguments = (_honest(arguments[0]), *arguments[1:])
        return move(self, *arguments, **named)

    return to


def _unpinned(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    _warn_once("pin_memory() does nothing on the host: no transfer to a device follows")
    return self


def _record_stream(self: torch.Tensor, stream: host_module.Stream) -> None:
    """The host frees memory only after the work on it is done."""


# What vendors' modules lack


@dataclass(frozen=True)
class DeviceProperties:
    """What is true of every chip; CUDA's own properties, such as multi_processor_count, are not."""

    name: str
    total_memory: int  # bytes

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the device {_device} has no property {name!r}, which is CUDA's")


def _get_device_properties(device: Any = None) -> Any:
    if _module is not host_module and hasattr(_module, "get_device_properties"):
        properties = _module.get_device_properties(_honest(device))
        if not isinstance(properties, dict):
            return properties
    return DeviceProperties(_module.get_device_name(_honest(device)), _total_bytes())


def _total_bytes() -> int:
    if _module is host_module:
        return host_module.mem_get_info()[1]
    if (total := adopted.memory_bytes(_device)) is None:
        raise RuntimeError(f"torch.{_device.type} does not say how much memory its chip has")
    return total


def _get_device_capability(device: Any = None) -> tuple[int, int]:
    _warn_once(
        f"the device {_device} has no CUDA compute capability; torch.cuda.get_device_capability "
        "returns (0, 0), so that checks for a newer GPU are false"
    )
    return (0, 0)


def _device_of(tensor: Any) -> Any:
    on_device = isinstance(tensor, torch.Tensor) and tensor.device.type == _device.type
    return _module.device((tensor.device.index or 0) if on_device else -1)


def _default_stream(device: Any = None) -> torch.Stream:
    current: Any = torch.accelerator.current_stream(_honest(device))
    return torch.Stream(
        stream_id=0, device_index=current.device_index, device_type=current.device_type
    )


def _device_memory_used(device: Any = None) -> int:
    free, total = _module.mem_get_info(device)
    return int(total - free)


def _ipc_collect() -> None:
    _warn_once("torch.cuda.ipc_collect() does nothing here: no CUDA IPC handles exist")


def _alias(name: str) -> Callable[..., Any]:
    """torch.cuda's older names."""
    return lambda *arguments, **named: getattr(_module, name)(*arguments, **named)


_ANSWERS: dict[str, Any] = {
    "Event": torch.Event,
    "Stream": torch.Stream,
    "StreamContext": lambda stream: stream,
    "current_stream": lambda device=None: torch.accelerator.current_stream(device),
    "default_stream": _default_stream,
    "device_memory_used": _device_memory_used,
    "device_of": _device_of,
    "get_arch_list": list,
    "get_device_capability": _get_device_capability,
    "get_device_properties": _get_device_properties,
    "get_gencode_flags": str,
    "ipc_collect": _ipc_collect,
    "is_current_stream_capturing": lambda: False,
    "is_initialized": lambda: True,
    "init": lambda: None,
    "is_tf32_supported": lambda: False,
    "max_memory_cached": _alias("max_memory_reserved"),
    "memory_cached": _alias("memory_reserved"),
    "reset_accumulated_memory_stats": lambda device=None: (
        torch.accelerator.reset_accumulated_memory_stats(device)
    ),
    "reset_max_memory_allocated": _alias("reset_peak_memory_stats"),
    "reset_max_memory_cached": _alias("reset_peak_memory_stats"),
    "seed_all": _alias("seed"),
    "set_stream": lambda stream: torch.accelerator.set_stream(stream),
    "stream": lambda stream: stream,
}
_ALWAYS_OURS = {"get_device_properties"}  # vendors answer with dicts, CUDA with an object

# nvtx ranges show in torch's profiler

_ranges: list[Any] = []


def _range_push(message: str) -> int:
    entered = torch.profiler.record_function(message)
    entered.__enter__()
    _ranges.append(entered)
    return len(_ranges) - 1


def _range_pop() -> int:
    if not _ranges:
        raise RuntimeError("torch.cuda.nvtx.range_pop() without a range_push()")
    _ranges.pop().__exit__(None, None, None)
    return len(_ranges)


@contextmanager
def _range(message: str, *arguments: Any, **named: Any) -> Iterator[None]:
    with torch.profiler.record_function(message.format(*arguments, **named)):
        yield


def _mark(message: str) -> None:
    with torch.profiler.record_function(message):
        pass


_NVTX = {"range_push": _range_push, "range_pop": _range_pop, "range": _range, "mark": _mark}
