"""Busy seconds count floating-point operations, on a chip that does a million a second."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import ditorch

A = torch.rand(8, 16, device="device")
B = torch.rand(16, 4, device="device")
BATCH = torch.rand(3, 8, 16, device="device")

DONE: list[tuple[Callable[[], object], int]] = [
    (lambda: A @ B, 2 * 8 * 16 * 4),
    (lambda: torch.addmm(A @ B, A, B), 2 * 2 * 8 * 16 * 4),
    (lambda: BATCH @ BATCH.mT, 2 * 3 * 8 * 16 * 8),
    # torch first copies what baddbmm adds to into its result
    (lambda: torch.baddbmm(BATCH[:, :, :8], BATCH, BATCH.mT), 3 * 8 * 8 + 2 * 3 * 8 * 16 * 8),
    (lambda: F.linear(BATCH, A, A[0, :8]), 2 * 3 * 8 * 16 * 8),
    (lambda: A @ B[:, 0], 2 * 8 * 16),
    (lambda: torch.dot(A[0], A[1]), 2 * 16),
    (lambda: A + A[0], 8 * 16),  # one for each element of the largest tensor
    (lambda: BATCH.sum(), 3 * 8 * 16),
]


@pytest.mark.parametrize(("work", "flops"), DONE)
def test_flops(work: Callable, flops: int) -> None:
    ditorch.pacing_reset()
    work()
    assert ditorch.pacing().busy_s == pytest.approx(flops / 1e6, abs=1e-6)
