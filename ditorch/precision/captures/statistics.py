"""What a tensor holds in a few numbers: enough to compare two runs that keep no tensors.

The digest says whether two tensors are bitwise equal. The sketch says how far apart they are: it is
a random projection to a few sums, so the distance between two sketches estimates the distance
between the tensors (a count sketch; 16 sums tell it to within some 20%). Both are computed on the
host, the sums in float64, and are the same on every platform.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from math import isfinite, sqrt
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ConfigDict
from torch import Tensor

_SUMS = 16
_ROW = 1024  # elements that share a sign of their row; a multiple of _SUMS


@dataclass(frozen=True, slots=True)
class Statistics:
    """A tensor's elements; `min` to `norm` are of the finite ones, complex ones as pairs."""

    digest: str  # of dtype and bytes, whatever the shape
    elements: int
    min: float = 0.0
    max: float = 0.0
    mean: float = 0.0
    norm: float = 0.0  # l2
    zeros: int = 0
    nans: int = 0
    infs: int = 0
    sketch: str = ""  # base64 of little-endian float64; empty when all sums are 0
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", ser_json_inf_nan="strings"
    )


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in row-major order in host memory, which they may share; waits only once."""
    there = [tensor.detach().to("cpu", non_blocking=True) for tensor in tensors]
    if any(tensor.device.type != "cpu" for tensor in tensors):
        torch.accelerator.synchronize()
    return [each.resolve_conj().resolve_neg().contiguous() for each in there]


def digest_of(host: Tensor) -> str:
    """Equal for bitwise equal tensors of one dtype."""
    digest = sha256(dtype_name(host.dtype).encode())
    digest.update(host.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def statistics_of(host: Tensor, digest: str) -> Statistics:
    """`host` as `on_host` gives it."""
    values = _as_float64(host)
    found: dict[str, Any] = {"digest": digest, "elements": host.numel()}
    if values.size:
        found["zeros"] = values.size - int(np.count_nonzero(values))
        total = float(values.sum())
        finite = values
        if not isfinite(total):
            nans = np.isnan(values)
            infs = np.isinf(values)
            found["nans"], found["infs"] = int(nans.sum()), int(infs.sum())
            finite = values[~(nans | infs)]
            values = np.where(nans | infs, 0.0, values)
            total = float(finite.sum())
        if finite.size:
            found["min"], found["max"] = float(finite.min()), float(finite.max())
            found["mean"], found["norm"] = total / finite.size, sqrt(float(finite @ finite))
        sums = _sketch(values)
        found["sketch"] = b64encode(sums.astype("<f8").tobytes()).decode() if sums.any() else ""
    return Statistics(**found)


def distance(ours: Statistics, theirs: Statistics) -> float:
    """An estimate of the l2 norm of the difference of two tensors of one shape."""
    if ours.digest == theirs.digest:
        return 0.0
    return float(np.sqrt(np.square(_sums(ours) - _sums(theirs)).sum()))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _as_float64(host: Tensor) -> NDArray[np.float64]:
    if host.is_complex():
        host = torch.view_as_real(host)
    values: NDArray[np.float64] = host.reshape(-1).to(torch.float64).numpy()
    return values


def _sketch(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums of the elements under random signs, element i going to sum i modulo 16.

    The sign of an element is that of its row of 1024 times that of its column, so that the whole is
    one product of a vector with a matrix.
    """
    rows = values.size // _ROW
    row_signs = _signs(1, _power_of_two(rows + 1))
    columns = row_signs[:rows] @ values[: rows * _ROW].reshape(rows, _ROW)
    rest = values[rows * _ROW :]
    columns[: rest.size] += row_signs[rows] * rest
    sums: NDArray[np.float64] = (columns * _signs(2, _ROW)).reshape(-1, _SUMS).sum(axis=0)
    return sums


def _sums(statistics: Statistics) -> NDArray[np.float64]:
    if not statistics.sketch:
        return np.zeros(_SUMS)
    return np.frombuffer(b64decode(statistics.sketch), "<f8")


@cache
def _signs(seed: int, count: int) -> NDArray[np.float64]:
    """Fixed random signs: the finaliser of splitmix64 over a counter."""
    bits = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits += np.uint64(seed * 0x632BE59BD9B4E019)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return np.where(bits >> np.uint64(63), -1.0, 1.0)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
