"""Busy seconds count kernel launches, on a chip whose every launch takes an emulated second."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import ditorch


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.rand(4, 4, device="device")


LAUNCHES: list[tuple[Callable[[torch.Tensor], object], int]] = [
    (lambda x: x + x, 1),
    (lambda x: x + 1, 1),
    (lambda x: x @ x, 1),
    (lambda x: torch.addmm(x, x, x), 1),
    (lambda x: F.linear(x, x, x[0]), 1),
    (lambda x: torch.softmax(x, -1), 1),
    (lambda x: F.layer_norm(x, (4,), x[0], x[1]), 1),
    (lambda x: F.rms_norm(x, (4,), x[0]), 1),
    (lambda x: x.sum(), 1),
    (lambda x: x.cumsum(0), 1),
    (lambda x: x.clone(), 1),
    (lambda x: x.to(torch.float16), 1),
    (lambda x: torch.zeros_like(x), 1),
    (lambda x: torch.sort(x), 1),
    (lambda x: torch._foreach_add_([x, x.clone(), x.clone()], 1.0), 3),
    (lambda x: torch.cat([x, x]), 1),
    (lambda x: x.mul_(2).add_(1), 2),
    (lambda x: torch.empty_like(x), 0),
    (lambda x: x.t().unsqueeze(0).expand(3, 4, 4)[1].detach(), 0),
    (lambda x: x.view(2, 8).unfold(0, 2, 1), 0),
    (lambda x: x.split(2), 0),
    (lambda x: torch.empty(3, device="device").resize_(5), 0),
]


@pytest.mark.parametrize(("work", "launches"), LAUNCHES)
def test_launches(x: torch.Tensor, work: Callable, launches: int) -> None:
    ditorch.pacing_reset()
    work(x)
    assert ditorch.pacing().busy_s == pytest.approx(launches, abs=1e-6)
