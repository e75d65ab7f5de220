"""Products of matrices with a sum are the chip's own, in strict mode, and agree with the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

NAMES = os.environ.get("DTYPES", "float32 float64 bfloat16 float16")  # that the chip multiplies
FLOATING = [getattr(torch, name) for name in NAMES.split()]


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def check(operator: Callable[..., Tensor], *arguments: Tensor) -> None:
    found = operator(*(one.to("device") for one in arguments))
    expected = operator(*arguments)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    slack = 8 * torch.finfo(expected.dtype).eps  # product and sum are each rounded
    torch.testing.assert_close(found.cpu(), expected, rtol=slack, atol=slack)


@pytest.mark.parametrize(("alpha", "beta"), [(1, 1), (1, 0), (-0.5, 1), (1, 2), (0, 1), (0.5, -2)])
@pytest.mark.parametrize("dtype", FLOATING)
def test_a_product_and_what_is_added(dtype: torch.dtype, alpha: float, beta: float) -> None:
    a, b = drawn(5, 6, dtype=dtype, seed=1), drawn(6, 7, dtype=dtype, seed=2)
    for shape in ((5, 7), (7,), (5, 1), (1, 1), ()):
        added = drawn(*shape, dtype=dtype, seed=3)
        check(lambda s, x, y: torch.addmm(s, x, y, beta=beta, alpha=alpha), added, a, b)
    check(lambda s, x, y: torch.addmm(s.t(), x, y, beta=beta, alpha=alpha),
          drawn(7, 5, dtype=dtype, seed=3), a, b)  # fmt: skip
    batches = drawn(3, 5, 6, dtype=dtype, seed=4), drawn(3, 6, 7, dtype=dtype, seed=5)
    for shape in ((3, 5, 7), (3, 1, 7), (5, 7), (7,)):
        added = drawn(*shape, dtype=dtype, seed=6)
        check(lambda s, x, y: torch.baddbmm(s, x, y, beta=beta, alpha=alpha), added, *batches)


def test_a_beta_of_0_leaves_what_is_added_unread() -> None:
    x = torch.ones(2, 2, device="device")
    added = torch.full((2,), torch.nan).to("device")
    assert torch.addmm(added, x, x, beta=0, alpha=3).tolist() == [[6.0, 6.0]] * 2


def test_a_product_of_nothing_is_what_is_added() -> None:
    added = torch.tensor([1.0, -2.0], device="device")
    nothing = torch.empty(3, 0, device="device")
    found = torch.addmm(added, nothing, nothing[:2].t(), beta=2, alpha=3)
    assert found.tolist() == [[2.0, -4.0]] * 3
    assert torch.addmm(added, added.expand(0, 2), torch.stack([added, added])).shape == (0, 2)


@pytest.mark.parametrize("dtype", FLOATING)
def test_a_linear_layer_with_a_bias(dtype: torch.dtype) -> None:
    x = drawn(4, 6, dtype=dtype, seed=1)
    weight, bias = drawn(3, 6, dtype=dtype, seed=2), drawn(3, dtype=dtype, seed=3)
    check(F.linear, x, weight, bias)
    layer = nn.Linear(6, 3, dtype=dtype).to("device")
    layer(x.to("device")).square().sum().backward()
    assert layer.bias.grad is not None and layer.weight.grad is not None
