"""Checks of random numbers: seeds, states, and who draws from which generator."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ditorch.conform.check import Group
from ditorch.conform.runtime_here import (
    DEVICE,
    device_module,
    expect,
    expect_equal,
    expect_error,
    need_accelerator,
)

generator = Group("generator")


def _draw(count: int = 8, generator: torch.Generator | None = None) -> list[float]:
    return torch.rand(count, device=DEVICE, generator=generator).tolist()


@generator("one seed gives the same numbers, another gives others")
def _seed() -> None:
    torch.manual_seed(5)
    first = _draw()
    torch.manual_seed(5)
    expect_equal(_draw(), first, "the numbers of the same seed")
    torch.manual_seed(6)
    expect(_draw() != first, "another seed gives the same numbers")


@generator("numbers lie where they should")
def _ranges() -> None:
    torch.manual_seed(0)
    x = torch.rand(10_000, device=DEVICE)
    expect(x.min().item() >= 0 and x.max().item() < 1, "rand() leaves [0, 1)")
    expect(abs(x.mean().item() - 0.5) < 0.05, f"the mean of rand() is {x.mean().item()}")
    y = torch.randn(10_000, device=DEVICE)
    expect(abs(y.std().item() - 1) < 0.1, f"the deviation of randn() is {y.std().item()}")
    z = torch.randint(3, 7, (1000,), device=DEVICE)
    expect_equal((z.min().item(), z.max().item()), (3, 6), "the ends of randint(3, 7)")
    expect_equal(sorted(torch.randperm(50, device=DEVICE).tolist()), list(range(50)), "randperm")
    expect_equal(torch.bernoulli(torch.ones(9, device=DEVICE)).sum().item(), 9, "bernoulli(1)")


@generator("a state that is kept and set gives the same numbers again")
def _state() -> None:
    module = device_module()
    state = module.get_rng_state()
    first = _draw()
    module.set_rng_state(state)
    expect_equal(_draw(), first, "the numbers after the state was set back")


@generator("fork_rng leaves the state as it was")
def _fork() -> None:
    module = device_module()
    state = module.get_rng_state()
    first = _draw()
    module.set_rng_state(state)
    index = DEVICE.index or 0
    with torch.random.fork_rng(devices=[index], device_type=DEVICE.type):
        _draw(100)
    expect_equal(_draw(), first, "the numbers after the fork")


@generator("generators of the device are independent and can be copied")
def _own() -> None:
    one = torch.Generator(device=DEVICE).manual_seed(3)
    other = torch.Generator(device=DEVICE).manual_seed(3)
    torch.manual_seed(9)
    first = _draw(generator=one)
    _draw(100)
    expect_equal(_draw(generator=other), first, "the numbers of a second generator, same seed")
    expect_equal(one.initial_seed(), 3, "the initial seed")
    state = one.get_state()
    following = _draw(generator=one)
    one.set_state(state)
    expect_equal(_draw(generator=one), following, "the numbers after set_state")


@generator("a generator of the host is refused")
def _foreign() -> None:
    need_accelerator("generator apart from the host's")
    expect_error(RuntimeError, lambda: _draw(generator=torch.Generator()), "the CPU's generator")


@generator("the host's generator is left alone")
def _host() -> None:
    need_accelerator("generator apart from the host's")
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    _draw(100)
    nn.functional.dropout(torch.ones(64, device=DEVICE), 0.5)
    expect_equal(torch.rand(3), expected, "the host's numbers")


@generator("dropout follows the seed, forward and backward")
def _dropout() -> None:
    x = torch.ones(64, device=DEVICE, requires_grad=True)
    torch.manual_seed(2)
    first = nn.functional.dropout(x, 0.5)
    torch.manual_seed(2)
    second = nn.functional.dropout(x, 0.5)
    expect_equal(second.detach(), first.detach(), "the second dropout of the same seed")
    kept = first.detach().count_nonzero().item()
    expect(8 < kept < 56, f"{kept} of 64 elements are kept at p = 0.5")
    first.sum().backward()
    expect_equal(x.grad, first.detach(), "the gradient: 2 where kept, else 0")


@generator("checkpointing recomputes the same dropout")
def _checkpoint() -> None:
    x = torch.ones(64, device=DEVICE, requires_grad=True)
    y = checkpoint(nn.functional.dropout, x, use_reentrant=False)
    y.sum().backward()
    expect_equal(x.grad, y.detach(), "the gradient of the recomputed dropout")
