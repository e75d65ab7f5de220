"""FlashAttention with a soft cap, which ATen's has not, through windows and within documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flash_by_definition import SCALE, by_definition, close, drawn, rows_of, same
from torch import Tensor

import ditorch
from ditorch.precision import Compare, Fallback

FORWARD, BACKWARD = "_flash_attention_forward", "_flash_attention_backward"

# heads, kv heads, size, value size, window, ends of documents, soft cap; blocks are of 64 and 128
CASES: list[tuple[Any, ...]] = [
    (4, 2, 16, 16, None, None, 2.0),
    (2, 2, 8, 24, 70, None, 0.5),
    (4, 1, 16, 16, None, [0, 5, 5, 133, 134, 300, 300, 300], 30.0),
    (2, 1, 1, 256, 9, [0, 100, 300], 1.0),
    (1, 1, 256, 1, 1, [0, 300], 50.0),
    (2, 1, 8, 8, None, [0, 300], 0.0),
]


def given_of(case: tuple[Any, ...], dtype: torch.dtype) -> list[Tensor]:
    *sizes, _, ends, _ = case
    return rows_of(*sizes, dtype, ends)


def attend(
    case: tuple[Any, ...], query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0
) -> Tensor:
    *_, window, ends, soft_cap = case
    if ends is not None:
        ends = torch.tensor(ends, dtype=torch.int32).to(query.device)
    longest = query.shape[-3]
    found: Tensor = torch.ops.ditorch._flash_attention_forward(
        *(query, key, value, ends, ends, longest, longest, dropout, True, False),
        scale=SCALE,
        window_size_left=None if window is None else window - 1,
        window_size_right=0,
        soft_cap=soft_cap,
    )[0]
    return found


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_dropped_is_what_dropout_drops_of_its_weights(
    case: tuple[Any, ...], dtype: torch.dtype
) -> None:
    """There are windows, documents and soft caps; the generator says what is dropped."""
    *given, gradient = given_of(case, dtype)
    ours = [each.to("device").requires_grad_() for each in given]
    theirs = [each.double().requires_grad_() for each in given]
    *sequences, length, heads, _ = given[0].shape
    torch.manual_seed(11)
    ones = torch.ones(*sequences, heads, length, length, device="device")
    kept = torch.nn.functional.dropout(ones, 0.3)
    torch.manual_seed(11)
    found = attend(case, *ours, dropout=0.3)
    found.backward(gradient.to("device"))
    expected = by_definition(*theirs, *case[4:], (kept.cpu() > 0).double() / 0.7)
    expected.backward(gradient.double())
    close(found, expected, dtype)
    for one, other in zip(ours, theirs, strict=True):
        close(one.grad, other.grad, dtype)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_host_computes_the_same_in_its_stead(case: tuple[Any, ...], dropout: float) -> None:
    *given, _ = given_of(case, torch.float32)

    def results() -> list[Tensor]:
        torch.manual_seed(3)
        leaves = [each.to("device").requires_grad_() for each in given]
        found = attend(case, *leaves, dropout=dropout)
        found.sum().backward()
        return [found, *(each.grad for each in leaves)]  # type: ignore[misc]

    ours = results()
    with Fallback(operators="*"):
        theirs = results()
    for one, other in zip(ours, theirs, strict=True):
        same(one, other)


def test_its_memory_grows_with_the_length_alone() -> None:
    query, key, value = (
        drawn(1, 2048, 1, 16, dtype=torch.float32, seed=seed).to("device").requires_grad_()
        for seed in (1, 2, 3)
    )
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    attend((1, 1, 16, 16, None, None, 2.0), query, key, value, dropout=0.5).sum().backward()
    taken = torch.accelerator.max_memory_allocated() - before
    assert taken < 2048 * 2048 * 4 / 8


def test_a_compiler_takes_it_whole() -> None:
    case = CASES[1]
    *given, _ = given_of(case, torch.float32)
    ours, theirs = ([each.to("device").requires_grad_() for each in given] for _ in range(2))
    compiled = torch.compile(lambda *rows: attend(case, *rows, 0.3), backend="aot_eager")
    found = []
    for leaves, run in ((ours, compiled), (theirs, lambda *rows: attend(case, *rows, 0.3))):
        torch.manual_seed(5)
        found.append(run(*leaves))
        found[-1].sum().backward()
    torch.testing.assert_close(found[0], found[1])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_precision_tools_find_it_within_the_standards() -> None:
    for case in CASES:
        *given, _ = given_of(case, torch.bfloat16)
        leaves = [each.to("device").requires_grad_() for each in given]
        with Compare(operators="*_flash_attention*") as tool:
            attend(case, *leaves).sum().backward()
        found = tool.findings().operators
        assert len(found) == 4 and all(each.passed for each in found), found
