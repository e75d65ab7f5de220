"""Operators of the emulated chip's own kernels, on one core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

ROWS, WIDTH = 256, 512

pytestmark = pytest.mark.benchmark(group="operators of emuchip")


def operators(device: torch.device) -> dict[str, Callable[[], Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(ROWS, WIDTH, generator=generator).to(device) for _ in range(2))
    square = torch.randn(WIDTH, WIDTH, generator=generator).to(device)
    weight = torch.ones(WIDTH, device=device)
    return {
        "add": lambda: x + y,
        "matmul": lambda: x @ square,
        "softmax": lambda: F.softmax(x, -1),
        "rms_norm": lambda: F.rms_norm(x, (WIDTH,), weight),
        "silu": lambda: F.silu(x),
        "sum": lambda: x.sum(-1),
    }


@pytest.mark.parametrize("name", ["add", "matmul", "softmax", "rms_norm", "silu", "sum"])
def test_operator(name: str, benchmark: Any) -> None:
    import ditorch

    operator = operators(torch.device(ditorch.device))[name]

    def run() -> None:
        operator()
        torch.accelerator.synchronize()

    benchmark.pedantic(run, rounds=200, warmup_rounds=20)
