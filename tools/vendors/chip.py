"""What is measured of a vendor's chip through ditorch: products, single operators, a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

CALLS, LARGE_CALLS = 50, 10  # of an operator, in one measurement
LAYERS = 4  # of the model
ELEMENTS = 256 * 256  # of the larger tensors


class Chip:
    """The chip that the process's environment chooses; the host's own kernels have one thread."""

    def __init__(self) -> None:
        import torch

        import ditorch

        torch.set_num_threads(1)
        self._device = str(ditorch.device)
        self._products: dict[int, Callable[[], Any]] = {}
        self._operators: dict[str, Callable[[], Any]] = {}
        self._step: Callable[[], None] | None = None

    def product_s(self, side: int, calls: int) -> float:
        """The time of a product of two square float32 matrices, of so many in a row."""
        if side not in self._products:
            self._products[side] = self._product(side)
        return self._seconds(self._products[side], calls, waits=True)

    def operators_s(self) -> dict[str, float]:
        """The time that the host takes to call each small operator; the chip may work on."""
        import torch

        if not self._operators:
            from dispatch_bench import operators

            self._operators = operators(self._device)
        found = {}
        for name, call in self._operators.items():
            found[name] = self._seconds(call, CALLS, waits=False)
            torch.accelerator.synchronize()
        return found

    def whole_s(self, dim: int, length: int) -> dict[str, float]:
        """The time of larger elementwise operators and of a training step, until they are done."""
        import torch

        x = torch.linspace(-2, 2, ELEMENTS, device=self._device)
        y = torch.ones_like(x)
        calls: dict[str, Callable[[], Any]] = {
            "add": lambda: x + y,
            "exp": lambda: x.exp(),
            "gelu": lambda: torch.nn.functional.gelu(x),
        }
        found = {
            f"{name} of {ELEMENTS}": self._seconds(call, LARGE_CALLS, waits=True)
            for name, call in calls.items()
        }
        return found | {f"training step, width {dim}": self.step_s(dim, length)}

    def step_s(self, dim: int, length: int) -> float:
        """The time of a training step."""
        return self._seconds(self._training_step(dim, length), 1, waits=True)

    def calls_on_host(self, dim: int, length: int) -> int:
        """How many operators of a training step the chip leaves to the host."""
        import ditorch

        before = sum(ditorch.fallback_counts().values())
        self.step_s(dim, length)
        return sum(ditorch.fallback_counts().values()) - before

    def step_shares(self, dim: int, length: int) -> tuple[float, float]:
        """Runs a step under torch's profiler: its seconds, and those in which a kernel ran."""
        import torch
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        step = self._training_step(dim, length)
        activities = [ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]
        with profile(activities=activities, acc_events=True) as profiled:
            seconds = self._seconds(step, 1, waits=True)
        kernels = [
            (event.time_range.start, event.time_range.end)
            for event in profiled.events()
            if event.device_type == DeviceType.PrivateUse1 and "(on the host)" not in event.name
        ]
        torch.accelerator.synchronize()
        return seconds, 1e-6 * covered(kernels)

    def _product(self, side: int) -> Callable[[], Any]:
        import torch

        torch.manual_seed(0)
        a, b = torch.randn(side, side), torch.randn(side, side)
        on_chip = a.to(self._device), b.to(self._device)
        out = torch.empty(side, side, device=self._device)
        torch.mm(*on_chip, out=out)
        torch.testing.assert_close(out.cpu(), a @ b, rtol=1e-4, atol=1e-3)
        return lambda: torch.mm(*on_chip, out=out)

    def _training_step(self, dim: int, length: int) -> Callable[[], None]:
        if self._step is None:
            import torch
            from small_llama import training_step

            self._step = training_step(
                torch.device(self._device), layers=LAYERS, dim=dim, length=length
            )
            self._step()  # builds kernels
        return self._step

    def _seconds(self, call: Callable[[], Any], calls: int, waits: bool) -> float:
        import torch

        start = time.perf_counter()
        for _ in range(calls):
            call()
        if waits:
            torch.accelerator.synchronize()
        return (time.perf_counter() - start) / calls


def covered(spans: list[tuple[float, float]]) -> float:
    """How much of the time the spans cover, which may overlap."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
