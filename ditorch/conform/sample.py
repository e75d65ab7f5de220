"""One sample of one operator, on this process's device against the CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves

import ditorch
from ditorch.conform.agree import disagreement, is_identical
from ditorch.conform.ambiguous import is_as_right
from ditorch.conform.arguments import copy_to, shared_memory, tensors_in
from ditorch.conform.exact import errs_like_cpu
from ditorch.conform.randomness import draws, draws_as_the_host
from ditorch.conform.results import Outcome, Status
from ditorch.conform.unsupported import why_unsupported, without_device_form
from ditorch.conform.variants import Broken, SampleCall, Variant, dropped_write

_HOST = torch.device("cpu")

_UNINITIALIZED = {
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
    "resize_", "resize_as_",
}  # fmt: skip
"""Operators whose result holds whatever was in memory: compared by dtype and shape."""

_OTHER_ARGUMENTS_ON_HOST = {"tensor_split"}
"""Operators that, on any device, want their tensor arguments but the first on the CPU."""


@dataclass(frozen=True)
class _Observed:
    """What one call left behind, seen from the host."""

    results: Any
    inputs: list[torch.Tensor]  # the tensors among the arguments, after the call
    shared: set[tuple[int, int]]  # (result, argument) that live in one memory
    drew: bool  # random numbers; known of the host only


def check_sample(variant: Variant, call: SampleCall, dtype: torch.dtype) -> Outcome | None:
    """What became of it, but for its name; None if the CPU refuses it."""
    try:
        expected = _observe(variant, call, _HOST)
    except Exception:
        return None
    if not expected.drew and not draws_as_the_host():
        expected = replace(expected, drew=draws(_call_on(_HOST, call)))
    if reason := without_device_form((call.arguments, expected.results), dtype):
        return _outcome("unsupported", reason)
    chip_runs, host_runs = _runs()
    try:
        actual = _observe(variant, call, ditorch.device)
        again = _observe(variant, call, ditorch.device) if expected.drew else actual
    except Broken as broken:
        return _outcome("failed", str(broken))
    except Exception as error:
        if reason := why_unsupported(error):
            return _outcome("unsupported", reason)
        return _outcome("failed", f"raised {type(error).__name__}: {_first_line(error)}")
    chip_runs_now, host_runs_now = _runs()
    on_chip, on_host = chip_runs_now > chip_runs, host_runs_now > host_runs
    computed_by = "both" if on_chip and on_host else "chip" if on_chip else "host"
    if not on_chip and not on_host:
        computed_by = "neither"
    found = _difference(actual, expected, dtype, variant, call)
    if not found and expected.drew and call.operator.name not in _UNINITIALIZED:
        found = _not_repeated(actual, again)
    return replace(_outcome("failed" if found else "passed", found or ""), computed_by=computed_by)


def _outcome(status: Status, reason: str) -> Outcome:
    return Outcome(dtype="", variant="", sample=0, status=status, reason=reason)


def _observe(variant: Variant, call: SampleCall, device: torch.device) -> _Observed:
    own = _call_on(device, call)
    torch.manual_seed(call.seed)
    numbers = torch.get_rng_state()
    results = variant.run(own)
    shared = shared_memory(results, own.arguments)
    wrong_place = [t.device for t in tensors_in(results) if t.device.type != device.type]
    if wrong_place:
        raise Broken(f"a result lies on {wrong_place[0]}, expected {device}")
    given = any(isinstance(leaf, torch.Generator) for leaf in tree_leaves(own.arguments))
    # Seen by the state it leaves: a dispatch mode would change what torch computes (pinv, out=).
    drew = given or (device == _HOST and not torch.equal(numbers, torch.get_rng_state()))
    return _Observed(_on_host(results), _on_host(tensors_in(own.arguments)), shared, drew)


def _call_on(device: torch.device, call: SampleCall) -> SampleCall:
    if call.operator.name in _OTHER_ARGUMENTS_ON_HOST:
        return replace(call, input=copy_to(call.input, device))
    first, args, kwargs = copy_to(call.arguments, device)
    return replace(call, input=first, args=args, kwargs=kwargs)


def _on_host(tree: Any) -> Any:
    return copy_to(tree, _HOST)


def _runs() -> tuple[int, int]:
    """Runs so far of the chip's kernels and of host fallbacks."""
    return sum(ditorch.kernel_counts().values()), sum(ditorch.fallback_counts().values())


def _difference(
    actual: _Observed, expected: _Observed, dtype: torch.dtype, variant: Variant, call: SampleCall
) -> str | None:
    """Why the chip did not do what the CPU did; None if it did."""
    values = not expected.drew and call.operator.name not in _UNINITIALIZED
    if reason := _form_difference(actual.results, expected.results):
        return reason
    if actual.shared != expected.shared:
        return _aliasing(actual.shared, expected.shared)
    reason = _value_difference(actual.results, expected.results, dtype) if values else None
    if reason and not (
        errs_like_cpu(actual.results, expected.results, variant, call)
        or is_as_right(actual.results, expected.results, dtype, call)
    ):
        return dropped_write(variant, actual.results) or reason
    return _changed_argument(actual, expected, tensors_in(call.arguments), dtype)


def _changed_argument(
    actual: _Observed, expected: _Observed, before: list[torch.Tensor], dtype: torch.dtype
) -> str | None:
    """Arguments must be what the CPU made of them; those it left alone, bit for bit."""
    compared = {argument for _, argument in expected.shared}  # as results
    triples = zip(actual.inputs, expected.inputs, before, strict=True)
    for i, (got, want, given) in enumerate(triples):
        reason = _form_difference(got, want)
        if not reason and want.shape == given.shape and is_identical(want, given):
            if not is_identical(got, want):
                return f"changed argument {i}, which the CPU leaves alone"
        elif not reason and i not in compared and not expected.drew:
            reason = disagreement(got, want, dtype)
        if reason:
            return f"changed argument {i} in another way than the CPU: {reason}"
    return None


def _form_difference(actual: Any, expected: Any) -> str | None:
    """Describes the first difference in structure, types, dtypes or shapes; None if all agree."""
    found, found_form = tree_flatten(actual)
    wanted, wanted_form = tree_flatten(expected)
    if found_form != wanted_form:
        return f"returned {_named(actual)}, expected {_named(expected)}"
    for i, (got, want) in enumerate(zip(found, wanted, strict=True)):
        prefix = f"result {i}: " if len(wanted) > 1 else ""
        if type(got) is not type(want):
            return f"{prefix}returned {_named(got)}, expected {_named(want)}"
        if not isinstance(want, torch.Tensor):
            continue
        if got.dtype != want.dtype:
            return f"{prefix}wrong dtype {got.dtype}, expected {want.dtype}"
        if got.shape != want.shape:
            return f"{prefix}wrong shape {list(got.shape)}, expected {list(want.shape)}"
    return None


def _value_difference(actual: Any, expected: Any, dtype: torch.dtype) -> str | None:
    """Describes the first difference between the values of two trees of the same structure.

    Returns None where all values agree.
    """
    wanted = tree_leaves(expected)
    for i, (got, want) in enumerate(zip(tree_leaves(actual), wanted, strict=True)):
        if reason := disagreement(got, want, dtype):
            return f"result {i}: {reason}" if len(wanted) > 1 else reason
    return None


def _named(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {len(value)}"
    return "a tensor" if isinstance(value, torch.Tensor) else type(value).__name__


def _aliasing(actual: set[tuple[int, int]], expected: set[tuple[int, int]]) -> str:
    missing, surplus = sorted(expected - actual), sorted(actual - expected)
    result, argument = (missing or surplus)[0]
    does, should = ("does not share", "it does") if missing else ("shares", "it does not")
    return f"result {result} {does} memory with argument {argument}; on the CPU {should}"


def _not_repeated(actual: _Observed, again: _Observed) -> str | None:
    pairs = zip(tensors_in(actual.results), tensors_in(again.results), strict=True)
    if all(first.shape == then.shape and is_identical(first, then) for first, then in pairs):
        return None
    return "an equal seed did not give equal random numbers"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"
