"""Products of groups of rows are one kernel of the chip, whose host does not know the groups."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ditorch
from ditorch.precision import Compare

OPERATOR = "_grouped_mm"


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def each_alone(rows: Tensor, weights: Tensor, ends: list[int]) -> Tensor:
    firsts = [0, *ends[:-1]]
    parts = [rows[i:j] @ w for i, j, w in zip(firsts, ends, weights, strict=True)]
    return torch.cat(parts)


@pytest.mark.parametrize("ends", [[3, 10, 24], [0, 24, 24], [5, 5, 24]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_each_group_has_its_own_product(
    ends: list[int], dtype: torch.dtype, transposed: bool
) -> None:
    rows, weights = drawn(24, 16, dtype=dtype, seed=1), drawn(3, 16, 32, dtype=dtype, seed=2)
    gradient = drawn(24, 32, dtype=dtype, seed=3)
    if transposed:
        weights = weights.mT.contiguous().mT
    ours = rows.to("device").requires_grad_(), weights.to("device").requires_grad_()
    theirs = rows.double().requires_grad_(), weights.double().requires_grad_()

    ditorch.reset_fallback_counts()
    before = ditorch.kernel_counts().get(OPERATOR, 0)
    places = torch.tensor(ends, dtype=torch.int32, device="device")
    found = torch._grouped_mm(*ours, offs=places)
    found.backward(gradient.to("device"))
    assert ditorch.kernel_counts()[OPERATOR] == before + 3  # and a gradient of each argument
    assert ditorch.fallback_counts() == {}

    expected = each_alone(*theirs, ends)
    expected.backward(gradient.double())
    slack = (40 if dtype is torch.float32 else 1) * torch.finfo(dtype).eps
    gradients = ((a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))
    for one, wanted in [(found, expected), *gradients]:
        assert one is not None and wanted is not None
        largest = wanted.abs().max().item()
        torch.testing.assert_close(
            one.detach().cpu().double(), wanted.detach(), rtol=0, atol=slack * largest
        )


def test_ends_that_do_not_fit_are_left_to_the_host() -> None:
    rows, weights = torch.ones(8, 4), torch.ones(2, 4, 4)
    ends = torch.tensor([4, 9], dtype=torch.int32)
    ditorch.reset_fallback_counts()
    found = torch._grouped_mm(rows.to("device"), weights.to("device"), offs=ends.to("device"))
    assert ditorch.fallback_counts() == {OPERATOR: 1}
    torch.testing.assert_close(found.cpu(), torch._grouped_mm(rows, weights, offs=ends))


def test_precision_tools_know_what_it_is() -> None:
    """The CPU has no such product of float64."""
    rows = drawn(24, 16, dtype=torch.float32, seed=1).to("device").requires_grad_()
    weights = drawn(3, 16, 32, dtype=torch.float32, seed=2).to("device").requires_grad_()
    ends = torch.tensor([3, 3, 24], dtype=torch.int32, device="device")
    with Compare(operators="aten._grouped_mm") as tool:
        torch._grouped_mm(rows, weights, offs=ends).square().sum().backward()
    (found,) = tool.findings().operators
    assert (found.calls, found.passed, tool.findings().notes) == (3, True, [])
