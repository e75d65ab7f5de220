"""FlashAttention by its name in ATen: windows, and documents that lie one after the other."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from flash_by_definition import SCALE, by_definition, close, drawn, rows_of, same
from torch import Tensor

import ditorch
from ditorch.precision import Compare, Fallback

FORWARD, BACKWARD = "_flash_attention_forward", "_flash_attention_backward"

# heads, kv heads, size, value size, window, ends of documents; blocks are of 64 and 128
CASES: list[tuple[Any, ...]] = [
    (4, 2, 16, 16, 70, None),
    (2, 2, 8, 24, None, None),
    (4, 1, 16, 16, None, [0, 5, 5, 133, 134, 300, 300, 300]),
    (2, 1, 8, 8, 9, [0, 100, 300]),
    (1, 1, 8, 8, 1, [0, 300]),
]


def given_of(case: tuple[Any, ...], dtype: torch.dtype) -> list[Tensor]:
    *sizes, _, ends = case
    return rows_of(*sizes, dtype, ends)


def attend(case: tuple[Any, ...], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    *_, window, ends = case
    if ends is not None:
        ends = torch.tensor(ends, dtype=torch.int32, device=query.device)
    longest = query.shape[-3]
    found: Tensor = torch.ops.aten._flash_attention_forward(
        *(query, key, value, ends, ends, longest, longest, 0.0, True, False),
        scale=SCALE,
        window_size_left=None if window is None else window - 1,
        window_size_right=0,
    )[0]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_and_its_gradients_are_those_of_the_definition(
    case: tuple[Any, ...], dtype: torch.dtype
) -> None:
    *given, gradient = given_of(case, dtype)
    ours = [each.to("device").requires_grad_() for each in given]
    theirs = [each.double().requires_grad_() for each in given]

    ditorch.reset_fallback_counts()
    before = ditorch.kernel_counts()
    found = attend(case, *ours)
    found.backward(gradient.to("device"))
    for name in (FORWARD, BACKWARD):
        assert ditorch.kernel_counts()[name] == before.get(name, 0) + 1
    assert not ditorch.fallback_counts().keys() & {FORWARD, BACKWARD}

    expected = by_definition(*theirs, *case[4:])
    expected.backward(gradient.double())
    close(found, expected, dtype)
    for one, other in zip(ours, theirs, strict=True):
        close(one.grad, other.grad, dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_host_computes_the_same_in_its_stead(case: tuple[Any, ...]) -> None:
    *given, _ = given_of(case, torch.float32)

    def results() -> list[Tensor]:
        leaves = [each.to("device").requires_grad_() for each in given]
        found = attend(case, *leaves)
        found.sum().backward()
        return [found, *(each.grad for each in leaves)]  # type: ignore[misc]

    ours = results()
    with Fallback(operators="*"):
        theirs = results()
    for one, other in zip(ours, theirs, strict=True):
        same(one, other)


def test_what_the_kernel_has_not_the_host_computes() -> None:
    """A window on both sides, and the last query being the last key's."""
    query, key = (
        drawn(1, rows, 1, 8, dtype=torch.float32, seed=rows).to("device") for rows in (3, 2000)
    )
    before = ditorch.kernel_counts().get(FORWARD, 0)
    arguments = None, None, 3, 2000, 0.0
    attend = torch.ops.aten._flash_attention_forward
    near = attend(
        *(query, key, key, *arguments, False, False), window_size_left=1, window_size_right=0
    )[0]
    far = attend(*(query, key, key, *arguments, True, False))[0]
    assert ditorch.kernel_counts().get(FORWARD, 0) == before
    scores = (query[0, :, 0] @ key[0, :, 0].T).cpu() / 8**0.5
    rows = torch.arange(2000) - torch.arange(1997, 2000).unsqueeze(1)
    for found, seen in ((near, (rows <= 0) & (rows >= -1)), (far, rows <= 0)):
        expected = torch.softmax(scores.masked_fill(~seen, -math.inf), -1) @ key[0, :, 0].cpu()
        torch.testing.assert_close(found[0, :, 0].cpu(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("ends", [[0, 2_000_000], [0, 3, 2, 4], [0, -1, 4]], ids=str)
def test_ends_that_are_none_are_refused(ends: list[int]) -> None:
    query = drawn(4, 1, 8, dtype=torch.float32, seed=1).to("device")
    good, bad = (torch.tensor(each, dtype=torch.int32, device="device") for each in ([0, 4], ends))
    arguments = 4, 4, 0.0, True
    out, sums, key, unused, _ = torch.ops.aten._flash_attention_forward(
        *(query, query, query, good, good), *arguments, False
    )
    with pytest.raises(RuntimeError, match=r"document . has the rows from .*expected ends that"):
        torch.ops.aten._flash_attention_forward(*(query, query, query, bad, bad), *arguments, False)
    with pytest.raises(RuntimeError, match=r"document . has the rows from .*expected ends that"):
        torch.ops.aten._flash_attention_backward(
            *(query, query, query, query, out, sums, bad, bad), *arguments, key, unused
        )


def test_rows_after_the_last_document_are_zero() -> None:
    query = drawn(4, 1, 8, dtype=torch.float32, seed=1).to("device")
    ends = torch.tensor([0, 3], dtype=torch.int32, device="device")
    found = torch.ops.aten._flash_attention_forward(
        *(query, query, query, ends, ends, 4, 4, 0.0, True, False)
    )[0]
    assert found[3].count_nonzero() == 0


def test_precision_tools_find_it_within_the_standards() -> None:
    for case in CASES:
        *given, _ = given_of(case, torch.bfloat16)
        leaves = [each.to("device").requires_grad_() for each in given]
        with Compare(operators="*_flash_attention*") as tool:
            attend(case, *leaves).sum().backward()
        found = tool.findings().operators
        assert len(found) == 4 and all(each.passed for each in found), found
