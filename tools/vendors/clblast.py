"""CLBlast by itself: its product of float32 matrices on OpenCL's first device, through ctypes."""

from __future__ import annotations

import ctypes
import time
from ctypes import byref, c_float, c_int, c_size_t, c_uint, c_ulong, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np

GPU, ANY = 1 << 2, 0xFFFFFFFF  # CL_DEVICE_TYPE_*
READ_WRITE, COPY_HOST_POINTER = 1, 1 << 5  # CL_MEM_*
ROW_MAJOR, NOT_TRANSPOSED, SINGLE = 101, 111, 32  # CLBlast's
TOLERANCE = 1e-3  # absolute: elements are about the root of the side
TRIES = 3  # of parameters, whose best counts

# The parameters of CLBlast's two kernels, in the order in which its tuners print them.
NAMES = {
    "XgemmDirect": "WGD MDIMCD NDIMCD MDIMAD NDIMBD KWID VWMD VWND PADA PADB",
    "Xgemm": "GEMMK MWG NWG KWG MDIMC NDIMC MDIMA NDIMB KWI VWM VWN STRM STRN SA SB KREG",
}


class NotThere(Exception):
    """One sentence about what this machine lacks."""


@dataclass(frozen=True)
class Parameters:
    """What one of CLBlast's kernels is compiled with; it is the one that multiplies then."""

    kernel: str
    values: tuple[int, ...]

    @property
    def by_name(self) -> dict[str, int]:
        return dict(zip(NAMES[self.kernel].split(), self.values, strict=True))


# What CLBlast is tuned by on processors, the likeliest best first: its kernel without barriers,
# then the best that its tuners found of the others on PoCL. They try hundreds, for half an hour.
CANDIDATES = (
    Parameters("Xgemm", (1, 32, 32, 1, 4, 4, 4, 4, 1, 8, 4, 0, 0, 0, 0, 4)),
    Parameters("Xgemm", (1, 64, 64, 1, 4, 4, 4, 4, 1, 8, 4, 0, 0, 0, 0, 4)),
    Parameters("Xgemm", (1, 64, 64, 1, 8, 8, 8, 8, 1, 8, 4, 0, 0, 0, 0, 4)),
    Parameters("Xgemm", (0, 32, 64, 32, 8, 16, 8, 16, 2, 4, 1, 0, 0, 0, 0, 1)),
    Parameters("XgemmDirect", (32, 32, 8, 8, 16, 16, 1, 2, 0, 1)),
)


class Clblast:
    """A product of two square matrices. Raises NotThere."""

    def __init__(self, side: int) -> None:
        self._opencl, self._clblast = _library("libOpenCL.so.1"), _library("libclblast.so.1")
        self._side = side
        self._device = self._first_device()
        context = self._make("clCreateContext", None, c_uint(1), byref(self._device), None, None)
        self._queue = self._make("clCreateCommandQueueWithProperties", context, self._device, None)
        numbers = np.random.default_rng(0)
        self._a, self._b = (
            numbers.standard_normal((side, side), dtype=np.float32) for _ in range(2)
        )
        self._out = np.zeros_like(self._a)
        self._buffers = [
            self._make(
                "clCreateBuffer",
                context,
                c_ulong(READ_WRITE | COPY_HOST_POINTER),
                c_size_t(matrix.nbytes),
                c_void_p(matrix.ctypes.data),
            )
            for matrix in (self._a, self._b, self._out)
        ]

    def tune(self, count: int) -> str:
        """Tries so many of the CANDIDATES and keeps the fastest; returns it."""
        times_s = {}
        for each in CANDIDATES[:count]:
            if self._multiplies_by(each):
                times_s[each] = min(self.seconds(1) for _ in range(TRIES))
        if not times_s:
            raise NotThere("CLBlast multiplies by none of the parameters on this device")
        best = min(times_s, key=lambda each: times_s[each])
        self._multiplies_by(best)
        chosen = " ".join(f"{name}={value}" for name, value in best.by_name.items())
        return f"{best.kernel} {chosen}, the best of {len(times_s)}"

    def seconds(self, calls: int) -> float:
        """The time of a product, of so many that are enqueued together."""
        start = time.perf_counter()
        for _ in range(calls):
            self._check("CLBlastSgemm", self._multiply())
        self._check("clFinish", self._opencl.clFinish(self._queue))
        return (time.perf_counter() - start) / calls

    def is_right(self) -> bool:
        """Multiplies once, into zeros, and compares with NumPy."""
        self._out[:] = 0
        self._copy("clEnqueueWriteBuffer")
        if self._multiply() != 0:
            return False
        self._copy("clEnqueueReadBuffer")
        return bool(np.abs(self._out - self._a @ self._b).max() < TOLERANCE)

    def _copy(self, function: str) -> None:
        """Copies between the result of the device and that of the host."""
        status = getattr(self._opencl, function)(
            self._queue, self._buffers[2], c_uint(1), c_size_t(0), c_size_t(self._out.nbytes),
            c_void_p(self._out.ctypes.data), c_uint(0), None, None,
        )  # fmt: skip
        self._check(function, status)

    def _multiply(self) -> int:
        a, b, out = self._buffers
        side, zero, one_more = c_size_t(self._side), c_size_t(0), c_void_p(self._queue.value)
        status: int = self._clblast.CLBlastSgemm(
            ROW_MAJOR, NOT_TRANSPOSED, NOT_TRANSPOSED, side, side, side, c_float(1), a, zero, side,
            b, zero, side, c_float(0), out, zero, side, byref(one_more), None,
        )  # fmt: skip
        return status

    def _multiplies_by(self, parameters: Parameters) -> bool:
        """Takes the parameters; false if the device cannot, or computes something else by them."""
        is_direct = parameters.kernel == "XgemmDirect"
        smallest_indirect = 1 << 20 if is_direct else 1
        self._override("GemmRoutine", {"XGEMM_MIN_INDIRECT_SIZE": smallest_indirect})
        self._override(parameters.kernel, parameters.by_name)
        return self.is_right()

    def _override(self, kernel: str, values: dict[str, int]) -> None:
        count = len(values)
        names = (ctypes.c_char_p * count)(*(name.encode() for name in values))
        status = self._clblast.CLBlastOverrideParameters(
            self._device, kernel.encode(), SINGLE, c_size_t(count), names,
            (c_size_t * count)(*values.values()),
        )  # fmt: skip
        self._check("CLBlastOverrideParameters", status)

    def _first_device(self) -> c_void_p:
        """The device that ditorch calls ocl:0: the first GPU, else the first of all."""
        count = c_uint()
        self._opencl.clGetPlatformIDs(0, None, byref(count))
        platforms = (c_void_p * count.value)()
        self._opencl.clGetPlatformIDs(count, platforms, None)
        for kind in (GPU, ANY):
            for platform in platforms:
                device = c_void_p()
                found = self._opencl.clGetDeviceIDs(
                    c_void_p(platform), c_ulong(kind), c_uint(1), byref(device), None
                )
                if found == 0:
                    return device
        raise NotThere("there is no OpenCL device: tools/packages opencl")

    def _make(self, function: str, *arguments: Any) -> c_void_p:
        code = c_int()
        make = getattr(self._opencl, function)
        make.restype = c_void_p
        made = c_void_p(make(*arguments, byref(code)))
        self._check(function, code.value)
        return made

    def _check(self, function: str, status: int) -> None:
        if status != 0:
            raise NotThere(f"{function} failed on this machine's OpenCL device: {status}")


def _library(name: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(name)
    except OSError:
        raise NotThere(f"{name} is not here: tools/packages opencl") from None
