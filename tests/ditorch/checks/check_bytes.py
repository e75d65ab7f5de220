"""Busy seconds count the bytes that operators move, on a chip that moves a million a second."""

from collections.abc import Callable

import pytest
import torch

import ditorch

MOVED: list[tuple[Callable[[torch.Tensor], object], int]] = [
    (lambda x: x + x, 2 * 4000),  # the same tensor twice is read once
    (lambda x: x.add_(1), 4000),  # argument and result are one tensor
    (lambda x: x + x.view(-1)[:1000], 3 * 4000),
    (lambda x: x.sum(), 4000 + 4),
    (lambda x: x.cumsum(0), 2 * 4000),
    (lambda x: x.double(), 4000 + 8000),
    (lambda x: torch._foreach_mul_([x], 2.0), 4000),
    (lambda x: torch.ones(1000, device="device"), 4000),
    (lambda x: torch.cat([x, x[:500]]), 4000 + 2000 + 6000),
    (lambda x: torch.mm(x.view(10, 100), x.view(100, 10)), 4000 + 4000 + 400),
]


@pytest.mark.parametrize(("work", "moved_bytes"), MOVED)
def test_bytes(work: Callable, moved_bytes: int) -> None:
    x = torch.rand(1000, device="device")
    ditorch.pacing_reset()
    work(x)
    assert ditorch.pacing().busy_s == pytest.approx(moved_bytes / 1e6, abs=1e-6)
