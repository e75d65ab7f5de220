"""When two values are the same value."""

from __future__ import annotations

from typing import Any

import torch

# (relative, absolute) tolerance to the CPU's result, by dtype; other dtypes must be equal. The
# CPU's own result is rounded as much as the chip's, so these allow each a few last bits. The
# absolute one shrinks with results that are all below 1, lest it hide what is wrong with them.
_TOLERANCES = {
    torch.float64: (1e-7, 1e-7),
    torch.complex128: (1e-7, 1e-7),
    torch.float32: (1e-5, 1e-5),
    torch.complex64: (1e-5, 1e-5),
    torch.float16: (4e-3, 1e-3),
    torch.complex32: (4e-3, 1e-3),
    torch.bfloat16: (2e-2, 1e-2),
}


def disagreement(actual: Any, expected: Any, dtype: torch.dtype) -> str | None:
    """Why `actual` is not `expected`, in one sentence; None if they agree.

    Both are tensors on the CPU of one dtype and shape, or Python numbers. `dtype` is the one the
    operator computed in: results of a wider dtype are as exact as that one.
    """
    if not isinstance(expected, torch.Tensor):
        if not isinstance(expected, float | complex):
            return None if actual == expected else f"returned {actual!r}, expected {expected!r}"
        actual, expected = torch.tensor(actual), torch.tensor(expected)
    if expected.dtype not in _TOLERANCES:
        return _unequal(actual, expected)
    relative, absolute = max(
        _TOLERANCES[expected.dtype], _TOLERANCES.get(dtype, _TOLERANCES[expected.dtype])
    )
    if expected.is_complex():
        actual, expected = _parts(actual), _parts(expected)
    return _far(actual.double(), expected.double(), relative, absolute)


def same_specials(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether NaN, inf and -inf are in the same places of two tensors of one dtype and shape."""
    if expected.is_complex():
        actual, expected = _parts(actual), _parts(expected)
    actual, expected = actual.double(), expected.double()
    finite = torch.isfinite(expected)
    agree = (actual == expected) | (actual.isnan() & expected.isnan())
    return bool(torch.where(finite, torch.isfinite(actual), agree).all())


def is_identical(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal values, NaN equal to NaN, for two tensors on the CPU of one dtype and shape."""
    if expected.is_complex():
        actual, expected = _parts(actual), _parts(expected)
    if expected.is_floating_point():  # float8 and the like have no comparison of their own
        actual, expected = actual.double(), expected.double()
    return bool(((actual == expected) | (actual.isnan() & expected.isnan())).all())


def _parts(value: torch.Tensor) -> torch.Tensor:
    wide = value.to(torch.complex128) if value.dtype == torch.complex32 else value
    return torch.view_as_real(wide.resolve_conj())


def _unequal(actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    if not expected.is_floating_point():
        wrong = actual != expected
    else:  # float8 and the like have no comparison of their own
        actual, expected = actual.float(), expected.float()
        wrong = (actual != expected) & ~(actual.isnan() & expected.isnan())
    return _first(wrong, actual, expected, "wrong values") if wrong.any() else None


def _far(
    actual: torch.Tensor, expected: torch.Tensor, relative: float, absolute: float
) -> str | None:
    for name, found in (("NaN", torch.isnan), ("inf", torch.isinf)):
        wrong = found(actual) != found(expected)
        if wrong.any():
            return _first(wrong, actual, expected, f"{name} in other places")
    if not expected.numel():
        return None
    absolute *= min(1.0, float(expected.abs().nan_to_num(posinf=0.0).max()))
    error = (actual - expected).abs()
    error[~torch.isfinite(expected)] = 0
    error[torch.isinf(expected) & (actual != expected)] = torch.inf
    excess = error - (absolute + relative * expected.abs()).nan_to_num(posinf=0.0)
    if not (excess > 0).any():
        return None
    worst = excess.flatten().argmax()
    return _first(
        torch.arange(excess.numel()).reshape(excess.shape) == worst,
        actual, expected, f"wrong values: {int((excess > 0).sum())} of {excess.numel()}",
    )  # fmt: skip


def _first(wrong: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor, what: str) -> str:
    index = tuple(wrong.nonzero()[0].tolist())
    got, wanted = actual[index].item(), expected[index].item()
    return f"{what}; at {list(index)} {got:.8g}, expected {wanted:.8g}"
