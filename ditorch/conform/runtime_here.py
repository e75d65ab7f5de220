"""What the runtime checks share: this process's device, and small tensors on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import ditorch
from ditorch.conform.check import Unsupported

DEVICE = ditorch.device


def ramp(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """0, 1, 2 ... on the device."""
    return torch.arange(torch.Size(shape).numel(), dtype=dtype).view(shape).to(DEVICE)


def gradient(tensor: torch.Tensor) -> torch.Tensor:
    expect(tensor.grad is not None, "there is no gradient")
    assert tensor.grad is not None
    return tensor.grad


def need_accelerator(what: str) -> None:
    """Raises Unsupported on the CPU; for checks of what torch offers on accelerators only."""
    if DEVICE.type == "cpu":
        raise Unsupported(f"torch has no {what} on the CPU")


def device_module() -> Any:
    """`torch.cuda`, `torch.emuchip`, ...: what torch's own helpers reach a device through."""
    need_accelerator("device module")
    return torch.get_device_module(DEVICE)


def from_accelerator(name: str) -> Any:
    """A function of torch.accelerator; some came with later releases of torch."""
    need_accelerator("torch.accelerator")
    if not hasattr(torch.accelerator, name):
        raise Unsupported(f"torch {torch.__version__} has no torch.accelerator.{name}")
    return getattr(torch.accelerator, name)


def expect(holds: bool, otherwise: str) -> None:
    """A check's statement; unlike assert it is there under `python -O` too."""
    if not holds:
        raise AssertionError(otherwise)


def expect_equal(found: object, expected: object, what: str) -> None:
    if isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor):
        same = found.dtype == expected.dtype and torch.equal(found.cpu(), expected.cpu())
    else:
        same = found == expected
    expect(same, f"{what} is {found}, expected {expected}")


def expect_error(
    kinds: type[Exception] | tuple[type[Exception], ...], action: Callable[[], object], what: str
) -> Exception:
    try:
        action()
    except kinds as error:
        return error
    raise AssertionError(f"{what} was accepted, expected an error")
