"""libemuchip.so as ditorch sees it: the two C tables, through ctypes and without torch."""

from __future__ import annotations

import ctypes
import os
import shutil
import tomllib
from collections.abc import Callable
from ctypes import (
    CFUNCTYPE,
    POINTER,
    byref,
    c_char,
    c_char_p,
    c_double,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
    sizeof,
)
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "ditorch" / "lib" / "libemuchip.so"
CHIPS = ROOT / "ditorch" / "chips"

OK, ERROR, OUT_OF_MEMORY, NOT_IMPLEMENTED, NOT_READY, INVALID = range(6)
HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = range(3)
DTYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3, "int64": 7}


class Properties(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("vendor", c_char * 64),
        ("chip_type", c_char * 64),
        ("library", c_char * 64),
        ("memory_bytes", c_uint64),
        ("host_accessible", c_int32),
        ("nic_accessible", c_int32),
    ]


class Work(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("name", c_char_p),
        ("flops", c_double),
        ("bytes", c_double),
        ("dtype", c_int32),
        ("host_fallback", c_int32),
    ]


class Pacing(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("elapsed_s", c_double),
        ("busy_s", c_double),
        ("lost_s", c_double),
    ]


class PeerHandle(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("kind", c_int32),
        ("fd", c_int32),
        ("pointer", c_void_p),
        ("offset_bytes", c_uint64),
    ]


_DEVICE_AND_STREAM = (c_int32, c_void_p)


class Runtime(ctypes.Structure):
    _fields_ = [
        ("abi_version", c_uint32),
        ("struct_size", c_size_t),
        ("last_error", CFUNCTYPE(c_char_p)),
        ("device_count", CFUNCTYPE(c_int32, POINTER(c_int32))),
        ("device_properties", CFUNCTYPE(c_int32, c_int32, POINTER(Properties))),
        ("device_synchronize", CFUNCTYPE(c_int32, c_int32)),
        ("memory_allocate", CFUNCTYPE(c_int32, c_int32, c_size_t, POINTER(c_void_p))),
        ("memory_free", CFUNCTYPE(c_int32, c_int32, c_void_p)),
        ("memory_info", CFUNCTYPE(c_int32, c_int32, POINTER(c_size_t), POINTER(c_size_t))),
        (
            "memory_copy",
            CFUNCTYPE(c_int32, *_DEVICE_AND_STREAM, c_void_p, c_void_p, c_size_t, c_int32),
        ),
        ("stream_create", CFUNCTYPE(c_int32, c_int32, c_int32, POINTER(c_void_p))),
        ("stream_destroy", CFUNCTYPE(c_int32, *_DEVICE_AND_STREAM)),
        ("stream_query", CFUNCTYPE(c_int32, *_DEVICE_AND_STREAM)),
        ("stream_synchronize", CFUNCTYPE(c_int32, *_DEVICE_AND_STREAM)),
        ("event_create", CFUNCTYPE(c_int32, c_int32, c_int32, POINTER(c_void_p))),
        ("event_destroy", CFUNCTYPE(c_int32, c_int32, c_void_p)),
        ("event_record", CFUNCTYPE(c_int32, c_int32, c_void_p, c_void_p)),
        ("event_query", CFUNCTYPE(c_int32, c_int32, c_void_p)),
        ("event_synchronize", CFUNCTYPE(c_int32, c_int32, c_void_p)),
        ("stream_wait_event", CFUNCTYPE(c_int32, *_DEVICE_AND_STREAM, c_void_p)),
        ("event_elapsed_ns", CFUNCTYPE(c_int32, c_int32, c_void_p, c_void_p, POINTER(c_int64))),
        ("work_begin", CFUNCTYPE(c_int32, *_DEVICE_AND_STREAM)),
        ("work_end", CFUNCTYPE(c_int32, *_DEVICE_AND_STREAM, POINTER(Work))),
        ("stream_ready_at_ns", CFUNCTYPE(c_int32, *_DEVICE_AND_STREAM, POINTER(c_int64))),
        ("stream_wait_until_ns", CFUNCTYPE(c_int32, *_DEVICE_AND_STREAM, c_int64)),
        ("pacing", CFUNCTYPE(c_int32, c_int32, POINTER(Pacing))),
        ("pacing_reset", CFUNCTYPE(c_int32, c_int32)),
        (
            "memory_peer_handle",
            CFUNCTYPE(c_int32, c_int32, c_void_p, c_size_t, POINTER(PeerHandle)),
        ),
        ("work_span_ns", CFUNCTYPE(c_int32, c_int32, POINTER(c_int64), POINTER(c_int64))),
    ]


class Accessors(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("data", CFUNCTYPE(c_void_p, c_size_t)),
        ("dtype", CFUNCTYPE(c_int32, c_size_t)),
        ("dimensions", CFUNCTYPE(c_int32, c_size_t)),
        ("sizes", CFUNCTYPE(c_size_t, c_size_t)),
        ("strides", CFUNCTYPE(c_size_t, c_size_t)),
    ]


class Context(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("device", c_int32), ("stream", c_void_p)]


def _kernel(tensors: int, *more: Any) -> Any:
    return CFUNCTYPE(c_int32, POINTER(Context), *[c_size_t] * tensors, *more)


class Operators(ctypes.Structure):
    _fields_ = [
        ("abi_version", c_uint32),
        ("struct_size", c_size_t),
        ("set_accessors", CFUNCTYPE(c_int32, POINTER(Accessors))),
        ("matmul", _kernel(3)),
        ("softmax", _kernel(2)),
        ("softmax_backward", _kernel(3)),
        ("log_softmax", _kernel(2)),
        ("log_softmax_backward", _kernel(3)),
        ("layer_norm", _kernel(6, c_int64, c_double)),
        ("layer_norm_backward", _kernel(8, c_int64)),
        ("rms_norm", _kernel(4, c_int64, c_double)),
        ("rms_norm_backward", _kernel(6, c_int64)),
        ("sum", _kernel(2, c_int64, c_int64, c_int64)),
        ("mean", _kernel(2, c_int64, c_int64, c_int64)),
    ]


class Tensor:
    """A numpy array as a vendor's kernel is given it; bfloat16 is kept as its 16 bits."""

    def __init__(self, array: np.ndarray, dtype: str) -> None:
        self.array = array
        self.dtype = dtype
        self.sizes = (c_int64 * array.ndim)(*array.shape)
        self.strides = (c_int64 * array.ndim)(*(s // array.itemsize for s in array.strides))

    @staticmethod
    def of(values: np.ndarray, dtype: str) -> Tensor:
        """`values` rounded to the dtype, with the same layout."""
        return Tensor(round_to(values, dtype), dtype)

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: str) -> Tensor:
        """A result; filled with NaN so that an element nobody writes is seen."""
        return Tensor.of(np.full(shape, np.nan, dtype=np.float32), dtype)

    def values(self) -> np.ndarray:
        """The exact values, as float64."""
        if self.dtype == "bfloat16":
            return (self.array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return self.array.astype(np.float64)


def round_to(values: np.ndarray, dtype: str) -> np.ndarray:
    """`values` in the dtype's storage, layout kept."""
    if dtype != "bfloat16":
        return values.astype(dtype, order="K")
    bits = values.astype(np.float32, order="K").view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16, order="K")


class Vendor:
    """One chip: a library of its own, as each process of a cluster would have."""

    def __init__(self, directory: Path, chip_file: Path | None, devices: str | None = None) -> None:
        assert LIBRARY.is_file(), f"{LIBRARY} is missing: build it first (bash tools/test does)"
        # A copy is a library apart: the loader tells libraries by file, and a library has one chip.
        copy = directory / f"libemuchip-{len(list(directory.iterdir()))}.so"
        shutil.copy(LIBRARY, copy)
        library = ctypes.CDLL(str(copy))
        library.ditorch_vendor_runtime.restype = POINTER(Runtime)
        library.ditorch_vendor_operators.restype = POINTER(Operators)
        self.library = library
        self.runtime: Runtime = library.ditorch_vendor_runtime(1).contents
        self.operators: Operators = library.ditorch_vendor_operators(1).contents
        self.count_status, self.devices = self._read_chip(chip_file, devices)
        self._tensors: dict[int, Tensor] = {}
        self._accessors = self._make_accessors()
        if self.count_status == OK:
            assert self.operators.set_accessors(byref(self._accessors)) == OK

    def _read_chip(self, chip_file: Path | None, devices: str | None) -> tuple[int, int]:
        path = str(chip_file) if chip_file else None
        wanted = {"EMUCHIP_CHIP": path, "EMUCHIP_DEVICES": devices}
        before = {name: os.environ.get(name) for name in wanted}
        count = c_int32(-1)
        try:
            _set_environment(wanted)
            return self.runtime.device_count(byref(count)), count.value
        finally:
            _set_environment(before)

    def _make_accessors(self) -> Accessors:
        kinds: dict[str, Any] = {field[0]: field[1] for field in Accessors._fields_}
        read: dict[str, Callable[[Tensor], int]] = {
            "data": lambda tensor: tensor.array.ctypes.data,
            "dtype": lambda tensor: DTYPES[tensor.dtype],
            "dimensions": lambda tensor: tensor.array.ndim,
            "sizes": lambda tensor: ctypes.addressof(tensor.sizes),
            "strides": lambda tensor: ctypes.addressof(tensor.strides),
        }
        callbacks = {
            name: kinds[name](lambda handle, get=get: get(self._tensors[handle]))
            for name, get in read.items()
        }
        return Accessors(struct_size=sizeof(Accessors), **callbacks)

    def error(self) -> str:
        return self.runtime.last_error().decode()

    # operators

    def run(self, operator: str, *arguments: Tensor | int | float | None) -> int:
        """Calls a kernel; an absent tensor is None. Returns its status."""
        self._tensors = {
            place + 1: argument
            for place, argument in enumerate(arguments)
            if isinstance(argument, Tensor)
        }
        given = [
            place + 1 if isinstance(argument, Tensor) else 0 if argument is None else argument
            for place, argument in enumerate(arguments)
        ]
        context = Context(struct_size=sizeof(Context), device=0, stream=None)
        return getattr(self.operators, operator)(byref(context), *given)

    # runtime

    def allocate(self, size_bytes: int, device: int = 0) -> tuple[int, int | None]:
        pointer = c_void_p()
        return self.runtime.memory_allocate(device, size_bytes, byref(pointer)), pointer.value

    def memory(self, device: int = 0) -> tuple[int, int]:
        """Free and total bytes."""
        free, total = c_size_t(), c_size_t()
        assert self.runtime.memory_info(device, byref(free), byref(total)) == OK
        return free.value, total.value

    def stream(self) -> c_void_p:
        stream = c_void_p()
        assert self.runtime.stream_create(0, 0, byref(stream)) == OK
        return stream

    def event(self, timed: bool = True) -> c_void_p:
        event = c_void_p()
        assert self.runtime.event_create(0, int(timed), byref(event)) == OK
        return event

    def work(self, stream: c_void_p | None = None, **work: Any) -> int:
        """Submits an operator that the host computes in no time."""
        described = {"name": b"add", "flops": 0.0, "bytes": 0.0, "dtype": 0, **work}
        assert self.runtime.work_begin(0, stream) == OK
        return self.runtime.work_end(0, stream, byref(Work(struct_size=sizeof(Work), **described)))

    def ready_at_ns(self, stream: c_void_p | None = None) -> int:
        moment = c_int64()
        assert self.runtime.stream_ready_at_ns(0, stream, byref(moment)) == OK
        return moment.value

    def elapsed_ns(self, start: c_void_p, end: c_void_p) -> tuple[int, int]:
        elapsed = c_int64(-1)
        return self.runtime.event_elapsed_ns(0, start, end, byref(elapsed)), elapsed.value

    def pacing(self) -> Pacing:
        pacing = Pacing(struct_size=sizeof(Pacing))
        assert self.runtime.pacing(0, byref(pacing)) == OK
        return pacing


def _set_environment(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def chip_text(preset: str = "a-mini", **changes: Any) -> str:
    """A preset's chip file with some keys changed; `compute__launch_s` is launch_s in [compute].

    A change to None leaves the key out; a key the preset lacks is added.
    """
    values: dict[str, Any] = tomllib.loads((CHIPS / f"{preset}.toml").read_text())
    for place, value in changes.items():
        *table, key = place.split("__")
        target = values.setdefault(table[0], {}) if table else values
        target[key] = value
    lines = [_line(key, value) for key, value in values.items() if not isinstance(value, dict)]
    for name, table_values in values.items():
        if isinstance(table_values, dict):
            lines.append(f"[{name}]")
            lines += [_line(key, value) for key, value in table_values.items()]
    return "\n".join(lines) + "\n"


def _line(key: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return f"{key} = {str(value).lower()}"
    return f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value!r}"
