"""Attention is one kernel of the chip, and gives what its definition in float64 gives."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flash_by_definition import drawn
from torch import Tensor

import ditorch
from ditorch.precision import Compare, Fallback

FORWARD = "_scaled_dot_product_fused_attention_overrideable"

# heads, kv heads, queries, keys, size, value size, causal, bias, scale; blocks are of 64 and 128
CASES: list[tuple[Any, ...]] = [
    (4, 4, 130, 130, 16, 16, True, None, None),
    (4, 2, 70, 300, 8, 24, False, "dense", 0.3),
    (6, 2, 65, 65, 32, 32, False, "truth", None),
    (2, 1, 200, 150, 8, 8, True, None, None),
    (2, 2, 1, 1, 4, 4, False, "row", None),
]


def bias_of(kind: str | None, heads: int, queries: int, keys: int, dtype: torch.dtype) -> Any:
    if kind is None:
        return None
    if kind == "truth":
        seen = drawn(2, 1, queries, keys, dtype=torch.float64, seed=4) > -0.5
        seen[..., 3, :] = False  # a query that sees no key
        return seen
    shape = (2, heads, queries, keys) if kind == "dense" else (1, 1, queries, keys)
    return drawn(*shape, dtype=dtype, seed=4)


def by_definition(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> Tensor:
    sharing = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(sharing, 1) for each in (key, value))
    scores = query @ key.mT * scale
    if bias is not None and bias.dtype is torch.bool:
        scores = scores.masked_fill(~bias, -math.inf)
    elif bias is not None:
        scores = scores + bias.double()
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -math.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0) @ value


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_and_its_gradients_are_those_of_the_definition(
    case: tuple[Any, ...], dtype: torch.dtype
) -> None:
    heads, kv_heads, queries, keys, size, value_size, causal, kind, scale = case
    # as a model has them: heads next to each other in a row
    given = [
        drawn(2, queries, heads, size, dtype=dtype, seed=1).transpose(1, 2),
        drawn(2, keys, kv_heads, size, dtype=dtype, seed=2).transpose(1, 2),
        drawn(2, kv_heads, keys, value_size, dtype=dtype, seed=3),
    ]
    bias = bias_of(kind, heads, queries, keys, dtype)
    gradient = drawn(2, heads, queries, value_size, dtype=dtype, seed=5)
    ours = [each.to("device").requires_grad_() for each in given]
    theirs = [each.double().requires_grad_() for each in given]
    mask = None if bias is None else bias.to("device")

    ditorch.reset_fallback_counts()
    before = ditorch.kernel_counts()
    found = F.scaled_dot_product_attention(
        *ours, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=heads != kv_heads
    )
    found.backward(gradient.to("device"))
    for name in (FORWARD, f"{FORWARD}_backward"):
        assert ditorch.kernel_counts()[name] == before.get(name, 0) + 1
    assert ditorch.fallback_counts() == {}

    expected = by_definition(*theirs, bias, causal, scale or size**-0.5)
    if kind == "truth":  # whose softmax has no value there: neither have its gradients
        expected = expected * (expected != 0)
    expected.backward(gradient.double())
    slack = 30 * torch.finfo(dtype).eps if dtype.itemsize > 2 else torch.finfo(dtype).eps
    pairs = [(found, expected), *((a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))]
    for one, wanted in pairs:
        wanted = wanted.detach().nan_to_num(0.0)
        largest = max(1.0, wanted.abs().max().item())
        torch.testing.assert_close(
            one.detach().cpu().double(), wanted, rtol=0, atol=slack * largest
        )


def test_its_memory_grows_with_the_length_alone() -> None:
    query, key, value = (
        drawn(1, 1, 2048, 16, dtype=torch.float32, seed=seed).to("device").requires_grad_()
        for seed in (1, 2, 3)
    )
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    F.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()
    taken = torch.accelerator.max_memory_allocated() - before
    assert taken < 2048 * 2048 * 4 / 8


def test_what_the_kernel_has_not_is_composed() -> None:
    query = drawn(1, 2, 8, 4, dtype=torch.float32, seed=1).to("device").requires_grad_()
    before = ditorch.kernel_counts().get(FORWARD, 0)
    F.scaled_dot_product_attention(query, query, query, dropout_p=1.0)
    learned = torch.zeros(8, 8, device="device", requires_grad=True)
    F.scaled_dot_product_attention(query, query, query, attn_mask=learned).sum().backward()
    assert learned.grad is not None
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        F.scaled_dot_product_attention(query, query, query)
    assert ditorch.kernel_counts().get(FORWARD, 0) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_host_computes_the_same_in_its_stead(case: tuple[Any, ...], dtype: torch.dtype) -> None:
    """Precision tools let it, for every shape that the kernel takes."""
    heads, kv_heads, queries, keys, size, value_size, causal, kind, scale = case
    given = [
        drawn(2, heads, queries, size, dtype=dtype, seed=1).to("device"),
        drawn(2, kv_heads, keys, size, dtype=dtype, seed=2).to("device"),
        drawn(2, kv_heads, keys, value_size, dtype=dtype, seed=3).to("device"),
    ]
    bias = bias_of(kind, heads, queries, keys, dtype)
    mask = None if bias is None else bias.to("device")

    def results() -> list[Tensor]:
        leaves = [each.clone().requires_grad_() for each in given]
        found = F.scaled_dot_product_attention(
            *leaves, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=heads != kv_heads
        )
        found.sum().backward()
        return [found, *(each.grad for each in leaves)]  # type: ignore[misc]

    ours = results()
    with Fallback(operators="*"):
        theirs = results()
    slack = 2 * torch.finfo(dtype).eps if dtype.itemsize == 2 else 60 * torch.finfo(dtype).eps
    for one, other in zip(ours, theirs, strict=True):
        largest = max(1.0, other.abs().max().item())
        torch.testing.assert_close(one.cpu(), other.cpu(), rtol=0, atol=slack * largest)


def test_vmap_takes_it_apart() -> None:
    values = drawn(3, 1, 2, 8, 4, dtype=torch.float32, seed=1)
    ours = torch.vmap(lambda each: F.scaled_dot_product_attention(each, each, each))(
        values.to("device")
    )
    torch.testing.assert_close(
        ours.cpu(), F.scaled_dot_product_attention(values, values, values), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_precision_tools_find_it_within_the_standards(dtype: torch.dtype) -> None:
    leaves = [
        drawn(2, heads, 200, 16, dtype=dtype, seed=heads).to("device").requires_grad_()
        for heads in (4, 2, 2)
    ]
    with Compare(operators="*scaled_dot_product*") as tool:
        F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True).sum().backward()
    found = tool.findings().operators
    assert len(found) == 4 and all(each.passed for each in found), found
