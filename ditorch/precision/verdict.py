"""Whether a tensor that a chip computed is right, by the standards.

Every element is held to its own bound; none is averaged away. With u = ulp(|expected|) and eps of
the dtype the chip computes in (float32 for narrower ones), an element passes if

    |actual - expected| <= ulps * u + (roundings + sums * sqrt(n)) * eps * scale + smallest

where the numbers are the operator's in standards.toml, n is the reduction's length, scale the
magnitude of what was added up, and smallest two of the dtype's smallest normal numbers where chips
may flush. Where the operator adds a tensor to a product that chips may have rounded already, u is
of |expected| + |added|.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, sqrt

import torch
from torch import Tensor

from ditorch.precision.errors import Differences, differences, errors_of, spacing, worst_elements
from ditorch.precision.results import Element, Errors
from ditorch.precision.standards import OperatorClass, Standards


@dataclass(frozen=True)
class Judgement:
    """The verdict on one tensor."""

    passed: bool
    reason: str  # one sentence, when it did not pass
    errors: Errors
    threshold: str  # in words
    operator_class: str
    worst: list[Element] = field(default_factory=list)


def judge(
    call_operator: str,
    tensor_name: str,
    actual: Tensor,
    expected: Tensor,
    *,
    standards: Standards,
    dtype: torch.dtype,
    reduction_length: int = 1,
    scale: Tensor | None = None,
    reference_error: Errors | None = None,
    added: Tensor | None = None,
) -> Judgement:
    """Judges one result or written argument of an operator.

    Args:
        actual: What the chip computed, in its dtype, in host memory.
        expected: The truth in float64 or complex128, or the exact integers, in host memory.
        dtype: What `actual` ought to be; the numbers are of this dtype.
        reduction_length: How many terms an element adds up.
        scale: For each element, the sum of the magnitudes of what it adds up: |A| @ |B|, sum(|x|).
            Left out, it is |expected|.
        added: The magnitude of what is added last, to a product that may be rounded already.
        reference_error: A reference GPU's own errors against the same truth.
    """
    name = standards.class_of(call_operator)
    numbers = standards.numbers_of(call_operator)
    threshold = _in_words(numbers, dtype, reduction_length)
    misfit = _misfit(actual, expected, dtype)
    if misfit or numbers.rule == "not compared":
        reason = f"{tensor_name} {misfit}" if misfit else ""
        errors = Errors(elements=actual.numel())
        return Judgement(not misfit, reason, errors, threshold, name)
    found = differences(actual, expected)
    allowed = _allowed(found, numbers, dtype, reduction_length, scale, added, standards)
    share = _share(found.error, allowed)
    errors = errors_of(found, share)
    worst = worst_elements(found, share)
    reason = ""
    if errors.beyond_threshold:
        reason = _what_is_wrong(found, allowed, errors, worst[0])
    elif reference_error is not None:
        reason = _worse_than_reference(errors, reference_error, numbers, standards)
    reason = f"{tensor_name}: {reason}" if reason else ""
    return Judgement(not reason, reason, errors, threshold, name, worst)


def compute_eps(dtype: torch.dtype) -> float:
    """eps of the dtype that sums and intermediate values are kept in: float32 or wider."""
    return torch.finfo(torch.promote_types(dtype, torch.float32).to_real()).eps


def _misfit(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> str:
    if actual.shape != expected.shape:
        return f"has shape {list(actual.shape)}, expected {list(expected.shape)}"
    if actual.dtype != dtype:
        return f"is {str(actual.dtype)[6:]}, expected {str(dtype)[6:]}"
    return ""


def _is_exact(numbers: OperatorClass, dtype: torch.dtype) -> bool:
    return numbers.rule == "equal" or not (dtype.is_floating_point or dtype.is_complex)


def _allowed(
    found: Differences,
    numbers: OperatorClass,
    dtype: torch.dtype,
    reduction_length: int,
    scale: Tensor | None,
    added: Tensor | None,
    standards: Standards,
) -> Tensor:
    if _is_exact(numbers, dtype):
        return torch.zeros_like(found.error)
    stored = found.magnitude
    if added is not None:
        stored = stored + added.detach().reshape(-1).nan_to_num(0.0, 0.0, 0.0)
    allowed = numbers.ulps.of(dtype) * spacing(stored, dtype) + 2 * standards.smallest(dtype)
    if relative := _relative_bound(numbers, dtype, reduction_length):
        terms = found.magnitude if scale is None else scale.detach().reshape(-1).to(torch.float64)
        # Where the scale is not finite, neither are the terms: NaN and inf alone are compared.
        allowed += relative * terms.nan_to_num(0.0, 0.0, 0.0)
    return allowed


def _relative_bound(numbers: OperatorClass, dtype: torch.dtype, reduction_length: int) -> float:
    """What is allowed relative to the scale."""
    eps = compute_eps(dtype) if numbers.keeps == "wide" else torch.finfo(dtype).eps
    count = numbers.roundings.of(dtype) + numbers.sums * sqrt(max(reduction_length, 1))
    return count * eps


def _share(error: Tensor, allowed: Tensor) -> Tensor:
    return torch.where(error == 0, 0.0, error / allowed)  # inf where nothing is allowed


def _what_is_wrong(found: Differences, allowed: Tensor, errors: Errors, worst: Element) -> str:
    position = _position(worst.index, found.shape)
    at = f"at {worst.index} " if worst.index else ""
    got = f"{at}{worst.actual:.8g}, expected {worst.expected:.8g}"
    if disagreeing := int(found.disagreeing.sum()):
        return f"NaN or inf disagree in {disagreeing} of {errors.elements} elements; {got}"
    wrong = f"{errors.beyond_threshold} of {errors.elements} elements beyond the threshold"
    return f"{wrong}; {got}: off by {worst.error:.3g}, allowed {float(allowed[position]):.3g}"


def _position(index: list[int], shape: torch.Size) -> int:
    position = 0
    for each, size in zip(index, shape, strict=True):
        position = position * size + each
    return position


def _worse_than_reference(
    errors: Errors, reference: Errors, numbers: OperatorClass, standards: Standards
) -> str:
    """The ratio rule, for errors that are not negligible."""
    most = standards.importance[numbers.importance]
    if errors.max_ulp <= 1 or errors.worst_share_of_threshold <= most.negligible_share:
        return ""
    for name in ("max_rel", "mean_rel", "rmse"):
        ours, theirs = getattr(errors, name), getattr(reference, name)
        ratio = ours / theirs if theirs else inf if ours else 0.0
        if ratio > getattr(most, name):
            return (
                f"{name} is {ratio:.3g} times the reference's own ({ours:.3g}, {theirs:.3g}), at "
                f"most {getattr(most, name):g} for an operator of {numbers.importance} importance"
            )
    return ""


def _in_words(numbers: OperatorClass, dtype: torch.dtype, reduction_length: int) -> str:
    if numbers.rule == "not compared":
        return "dtype and shape only"
    if _is_exact(numbers, dtype):
        return "equal"
    words = [f"{numbers.ulps.of(dtype):g} ulp"]
    if relative := _relative_bound(numbers, dtype, reduction_length):
        words.append(f"{relative:.2g} scale")
    return f"|error| <= {' + '.join(words)}"
