"""scaled_dot_product_attention with dropout is one kernel, which drops what its parts would."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from check_attention import CASES, FORWARD, bias_of, by_definition
from flash_by_definition import drawn
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import ditorch
from ditorch.precision import Compare, Fallback


def rows_of(case: tuple[Any, ...], dtype: torch.dtype) -> list[Tensor]:
    """Query, key and value of 2 sequences, and the output's gradient."""
    heads, kv_heads, queries, keys, size, value_size, *_ = case
    return [
        drawn(2, queries, heads, size, dtype=dtype, seed=1).transpose(1, 2),
        drawn(2, keys, kv_heads, size, dtype=dtype, seed=2).transpose(1, 2),
        drawn(2, kv_heads, keys, value_size, dtype=dtype, seed=3),
        drawn(2, heads, queries, value_size, dtype=dtype, seed=5),
    ]


def attend(case: tuple[Any, ...], share: float, *rows: Tensor) -> Tensor:
    heads, kv_heads, queries, keys, _, _, causal, kind, scale = case
    bias = bias_of(kind, heads, queries, keys, rows[0].dtype)
    return F.scaled_dot_product_attention(
        *rows,
        attn_mask=None if bias is None else bias.to("device"),
        dropout_p=share,
        is_causal=causal,
        scale=scale,
        enable_gqa=heads != kv_heads,
    )


def results(case: tuple[Any, ...], share: float, dtype: torch.dtype) -> list[Tensor]:
    """The output and gradients on the chip, from one seed."""
    *given, gradient = rows_of(case, dtype)
    leaves = [each.to("device").requires_grad_() for each in given]
    torch.manual_seed(7)
    found = attend(case, share, *leaves)
    found.backward(gradient.to("device"))
    return [found.detach(), *(each.grad for each in leaves)]  # type: ignore[misc]


def by_dropping(
    query: Tensor, key: Tensor, value: Tensor, bias: Any, causal: bool, scale: float, kept: Tensor
) -> Tensor:
    identity = torch.eye(key.shape[2], dtype=torch.float64).expand(*value.shape[:3], -1)
    weights = by_definition(query, key, identity, bias, causal, scale)  # it mixes nothing else
    return (weights * kept) @ value.repeat_interleave(query.shape[1] // value.shape[1], 1)


@pytest.mark.parametrize("share", [0.1, 0.9])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("case", [case for case in CASES if case[7] != "truth"], ids=str)
def test_it_and_its_gradients_are_those_of_the_definition(
    case: tuple[Any, ...], dtype: torch.dtype, share: float
) -> None:
    heads, _, queries, keys, size, _, causal, kind, scale = case
    *given, gradient = rows_of(case, dtype)
    theirs = [each.double().requires_grad_() for each in given]
    ditorch.reset_fallback_counts()
    before = ditorch.kernel_counts()
    ours = results(case, share, dtype)
    for name in (FORWARD, f"{FORWARD}_backward"):
        assert ditorch.kernel_counts()[name] == before.get(name, 0) + 1
    assert ditorch.fallback_counts() == {}

    torch.manual_seed(7)
    kept = F.dropout(torch.ones(2, heads, queries, keys, device="device"), share).cpu() > 0
    assert queries == 1 or 0 < kept.double().mean() < 1
    bias = bias_of(kind, heads, queries, keys, dtype)
    scale = scale or size**-0.5
    expected = by_dropping(*theirs, bias, causal, scale, kept.double() / (1 - share))
    expected.backward(gradient.double())
    slack = 30 * torch.finfo(dtype).eps if dtype.itemsize > 2 else torch.finfo(dtype).eps
    slack /= 1 - share  # as much larger is what the output's rounding changes
    wanted = [expected.detach(), *(each.grad for each in theirs)]
    for one, other in zip(ours, wanted, strict=True):
        largest = max(1.0, other.abs().max().item())
        torch.testing.assert_close(one.cpu().double(), other, rtol=0, atol=slack * largest)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_its_parts_and_the_host_drop_the_same(case: tuple[Any, ...]) -> None:
    ours = results(case, 0.3, torch.float32)
    with sdpa_kernel(SDPBackend.MATH):
        parts = results(case, 0.3, torch.float32)
    with Fallback(operators="*"):
        host = results(case, 0.3, torch.float32)
    for one, *others in zip(ours, parts, host, strict=True):
        for other in others:
            largest = max(1.0, other.nan_to_num().abs().max().item())
            torch.testing.assert_close(
                one.nan_to_num().cpu(), other.nan_to_num().cpu(), rtol=0, atol=1e-5 * largest
            )


def test_what_is_computed_again_drops_the_same() -> None:
    rows = rows_of(CASES[0], torch.float32)[:3]
    found = []
    for again in (False, True):
        leaves = [each.to("device").requires_grad_() for each in rows]
        torch.manual_seed(2)
        if again:
            mixed = checkpoint(partial(attend, CASES[0], 0.5), *leaves, use_reentrant=False)
        else:
            mixed = attend(CASES[0], 0.5, *leaves)
        mixed.sum().backward()
        found.append([each.grad for each in leaves])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_compiler_takes_it_whole() -> None:
    rows = rows_of(CASES[0], torch.float32)[:3]
    compiled = torch.compile(lambda *each: attend(CASES[0], 0.5, *each), backend="aot_eager")
    found = []
    for run in (compiled, lambda *each: attend(CASES[0], 0.5, *each)):
        leaves = [each.to("device").requires_grad_() for each in rows]
        torch.manual_seed(2)
        mixed = run(*leaves)
        mixed.sum().backward()
        found.append([mixed.detach(), *(each.grad for each in leaves)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_two_calls_drop_unlike_and_all_may_be_dropped() -> None:
    rows = [each.to("device") for each in rows_of(CASES[0], torch.float32)[:3]]
    assert not torch.equal(attend(CASES[0], 0.5, *rows), attend(CASES[0], 0.5, *rows))
    assert attend(CASES[0], 1.0, *rows).abs().max().item() == 0


def test_its_memory_grows_with_the_length_alone() -> None:
    query, key, value = (
        drawn(1, 1, 2048, 16, dtype=torch.float32, seed=seed).to("device").requires_grad_()
        for seed in (1, 2, 3)
    )
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    F.scaled_dot_product_attention(
        query, key, value, is_causal=True, dropout_p=0.1
    ).sum().backward()
    taken = torch.accelerator.max_memory_allocated() - before
    assert taken < 2048 * 2048 * 4 / 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_precision_tools_find_it_within_the_standards(dtype: torch.dtype) -> None:
    leaves = [
        drawn(2, heads, 200, 16, dtype=dtype, seed=heads).to("device").requires_grad_()
        for heads in (4, 2, 2)
    ]
    with Compare(operators="*scaled_dot_product*") as tool:
        F.scaled_dot_product_attention(
            *leaves, is_causal=True, dropout_p=0.3, enable_gqa=True
        ).sum().backward()
    found = tool.findings().operators
    assert len(found) == 4 and all(each.passed for each in found), found
