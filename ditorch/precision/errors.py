"""How far a tensor is from the truth: every difference is taken in float64.

The truth is never rounded to the tensor's own dtype first: that would hide half a unit in the last
place of error, and invent as much where there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isnan, sqrt

import torch
from torch import Tensor

from ditorch.precision.results import Element, Errors

_DECADES = 16  # of the histogram: below 1e-16, 1e-15 ... 1
_WORST = 5


@dataclass(frozen=True, slots=True)
class Differences:
    """Two tensors element by element, in row-major order; all but the indices in float64.

    `error` is inf where only one is NaN or infinite, or both are infinite of unlike sign; it is 0
    where both are NaN, the same infinity, or infinite where the truth is beyond the dtype's range.
    """

    shape: torch.Size
    dtype: torch.dtype
    actual: Tensor  # float64 or complex128
    expected: Tensor
    error: Tensor
    magnitude: Tensor  # |expected|, 0 where that is not finite

    @property
    def disagreeing(self) -> Tensor:
        """Where NaN or inf do not agree."""
        return self.error.isinf()

    def ulp(self) -> Tensor:
        """The spacing of the dtype's numbers at each |expected|."""
        return spacing(self.magnitude, self.dtype)


def differences(actual: Tensor, expected: Tensor) -> Differences:
    """Computes the differences of two tensors of the same shape in host memory, element by element.

    `expected` is in float64 or complex128, or of an exact dtype (integers, booleans).
    """
    wide = torch.complex128 if actual.is_complex() or expected.is_complex() else torch.float64
    ours, truth = (_flat(tensor).to(wide) for tensor in (actual, expected))
    error = (ours - truth).abs()
    if _is_exact(actual) and _is_exact(expected):  # beyond 2^53 float64 does not tell them apart
        unequal = _flat(actual) != _flat(expected)
        error = torch.where(unequal, error.clamp(min=1.0), torch.zeros_like(error))
    magnitude = truth.abs()
    if not (bool(error.isfinite().all()) and bool(magnitude.isfinite().all())):
        error = _where_not_finite(ours, truth, error, actual.dtype)
        magnitude = torch.where(magnitude.isfinite(), magnitude, torch.zeros_like(magnitude))
    return Differences(actual.shape, actual.dtype, ours, truth, error, magnitude)


def errors_of(found: Differences, share: Tensor | None = None) -> Errors:
    """The statistics; `share` is each element's error as a share of what is allowed.

    Relative errors are relative to |expected|, but to no less than the rounding error of the
    tensor's largest element: about a truth of 0, a relative error says nothing.
    """
    elements = found.error.numel()
    if not elements:
        return Errors()
    relative = relative_errors(found)
    ulps = found.error / found.ulp()
    return Errors(
        elements=elements,
        max_abs=float(found.error.max()),
        max_rel=float(relative.max()),
        mean_rel=float(relative.mean()),
        rmse=float(found.error.square().mean().sqrt()),
        max_ulp=float(ulps.max()),
        worst_share_of_threshold=0.0 if share is None else float(share.max()),
        beyond_threshold=0 if share is None else int((share > 1).sum()),
        histogram=histogram(relative),
    )


def merged(parts: Sequence[Errors]) -> Errors:
    """The statistics of the elements of all parts together."""
    elements = sum(part.elements for part in parts)

    def mean(values: Iterable[float]) -> float:
        weighted = (v * part.elements for v, part in zip(values, parts, strict=True))
        return sum(weighted) / elements if elements else 0.0

    bins = max(len(part.histogram) for part in parts)
    return Errors(
        elements=elements,
        max_abs=max((p.max_abs for p in parts), key=size),
        max_rel=max((p.max_rel for p in parts), key=size),
        mean_rel=mean(p.mean_rel for p in parts),
        rmse=sqrt(mean(p.rmse**2 for p in parts)),
        max_ulp=max((p.max_ulp for p in parts), key=size),
        worst_share_of_threshold=max((p.worst_share_of_threshold for p in parts), key=size),
        beyond_threshold=sum(p.beyond_threshold for p in parts),
        histogram=[sum(p.histogram[i] for p in parts if i < len(p.histogram)) for i in range(bins)],
    )


def size(error: float) -> float:
    """Returns the magnitude of an error for comparisons, in which NaN is as large as infinity."""
    return inf if isnan(error) else abs(error)


def relative_errors(found: Differences) -> Tensor:
    eps = torch.finfo(found.dtype).eps if _has_fractions(found.dtype) else 0.0
    smallest = eps * float(found.magnitude.max()) or torch.finfo(torch.float64).tiny
    return torch.where(found.error == 0, 0.0, found.error / found.magnitude.clamp(min=smallest))


def histogram(relative: Tensor) -> list[int]:
    """Counts by decade: exactly 0, below 1e-16, below 1e-15 ... below 1, the rest."""
    edges = torch.tensor([10.0**-power for power in range(_DECADES, -1, -1)], dtype=torch.float64)
    bins = torch.bucketize(relative[relative > 0], edges, right=True)
    counts: list[int] = torch.bincount(bins, minlength=_DECADES + 2).tolist()
    return [int((relative == 0).sum()), *counts]


def worst_elements(found: Differences, share: Tensor) -> list[Element]:
    """The elements with the largest shares of what is allowed, the worst first; none that are 0."""
    wrong = share.nan_to_num(nan=inf)
    largest = wrong.topk(min(_WORST, wrong.numel()))
    return [
        Element(
            index=[int(each) for each in torch.unravel_index(position, found.shape)],
            actual=_number(found.actual[position]),
            expected=_number(found.expected[position]),
            error=float(found.error[position]),
        )
        for value, position in zip(largest.values, largest.indices, strict=True)
        if value > 0
    ]


def spacing(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighbouring numbers of `dtype` at each magnitude; 1 for integers."""
    if not _has_fractions(dtype):
        return torch.ones_like(magnitude)
    limits = torch.finfo(dtype)
    _, exponent = torch.frexp(magnitude.clamp(limits.smallest_normal, limits.max))
    return limits.eps * torch.exp2((exponent - 1).to(torch.float64))


def _where_not_finite(ours: Tensor, truth: Tensor, error: Tensor, dtype: torch.dtype) -> Tensor:
    if ours.is_complex():
        parts = zip(torch.view_as_real(ours).T, torch.view_as_real(truth).T, strict=True)
        one, other = (_where_not_finite(a, b, (a - b).abs(), dtype.to_real()) for a, b in parts)
        return torch.hypot(one, other)
    agree = (ours == truth) | (ours.isnan() & truth.isnan())
    if dtype.is_floating_point:
        limits = torch.finfo(dtype)
        beyond = truth.abs() >= limits.max * (1 - limits.eps)
        agree |= ours.isinf() & beyond & (ours.sign() == truth.sign())
    both = ours.isfinite() & truth.isfinite()
    return torch.where(agree, 0.0, torch.where(both, error, inf))


def _number(value: Tensor) -> float:
    return float(value.abs()) if value.is_complex() else float(value)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1)


def _has_fractions(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _is_exact(tensor: Tensor) -> bool:
    return not _has_fractions(tensor.dtype)
