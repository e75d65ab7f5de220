"""Compare where the host is the device: its float32 against its float64. Run by test_compare.py."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ditorch.precision.compare import Compare
from ditorch.precision.results import Findings


def attend(dtype: torch.dtype) -> Findings:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 4, 16, 8, generator=generator).to(dtype).requires_grad_() for _ in range(3)
    )
    with Compare() as compare:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum().backward()
        F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(16, 16).tril().log().to(dtype))
    return compare.findings()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_attention_is_compared_with_its_definition(dtype: torch.dtype) -> None:
    found = attend(dtype)
    assert found.passed, found.summary
    name = "aten._scaled_dot_product_flash_attention_for_cpu"
    compared = {(e.operator, e.tensor): e.errors.elements for e in found.operators}
    assert compared[f"{name}.default", "out.0"] == 2 * 2 * 4 * 16 * 8
    for gradient in range(3):
        assert compared[f"{name}_backward.default", f"out.{gradient}"] == 2 * 4 * 16 * 8


def test_wrong_fused_attention_is_found() -> None:
    library = torch.library.Library("aten", "IMPL")

    def without_causal_mask(
        q: Tensor, k: Tensor, v: Tensor, p: float = 0, is_causal: bool = False, **_: object
    ) -> tuple[Tensor, Tensor]:
        scores = q @ k.mT / q.shape[-1] ** 0.5
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    with warnings.catch_warnings(action="ignore"):
        library.impl("_scaled_dot_product_flash_attention_for_cpu", without_causal_mask, "CPU")
    try:
        found = attend(torch.float32)
    finally:
        library._destroy()
    assert found.first_bad is not None
    assert "_scaled_dot_product_flash_attention_for_cpu" in found.first_bad.operator
