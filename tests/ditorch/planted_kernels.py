"""Wrong kernels, for the conformance suite to find: see test_conform.py.

Imported by the suite's processes, it takes the place of the device's kernels for some operators;
each is broken in one way of its own.
"""

from __future__ import annotations

import os
import random
import time

import torch

import ditorch

_library = torch.library.Library("aten", "IMPL")


def _plant(name: str, kernel: object) -> None:
    _library.impl(name, kernel, "PrivateUse1")


def _on_host(function, x: torch.Tensor) -> torch.Tensor:
    return function(x.cpu()).to(ditorch.device)


def _one_element_wrong(x: torch.Tensor) -> torch.Tensor:
    result = torch.sin(x.cpu())
    if result.numel():
        result.view(-1)[-1] += 0.01
    return result.to(ditorch.device)


def _drops_its_write(x: torch.Tensor) -> torch.Tensor:
    return x


def _changes_its_input(x: torch.Tensor) -> torch.Tensor:
    result = _on_host(torch.exp, x)
    x.copy_(x.cpu() + 1)
    return result


def _nan_for_a_number(x: torch.Tensor) -> torch.Tensor:
    result = torch.atan(x.cpu())
    if result.numel():
        result.view(-1)[0] = torch.nan
    return result.to(ditorch.device)


def _infinite(x: torch.Tensor) -> torch.Tensor:
    return _on_host(lambda host: torch.full_like(host, torch.inf), x)


def _wrong_dtype(x: torch.Tensor) -> torch.Tensor:
    return _on_host(lambda host: torch.floor(host).double(), x)


def _wrong_shape(x: torch.Tensor) -> torch.Tensor:
    return _on_host(lambda host: torch.ceil(host)[None], x)


def _raises(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("the planted kernel is out of order")


def _not_there(x: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("no kernel for erfinv")


def _crashes(x: torch.Tensor) -> torch.Tensor:
    os.abort()


def _hangs(x: torch.Tensor) -> torch.Tensor:
    while True:
        time.sleep(1)


def _gradient_off_by_a_factor(gradient: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    right = torch.ops.aten.sigmoid_backward(gradient.cpu(), result.cpu())
    return (right * 1.01).to(ditorch.device)


def _ignores_the_seed(x: torch.Tensor, rate: float = 1, generator=None) -> torch.Tensor:
    drawn = torch.empty(x.shape, dtype=x.dtype)
    drawn.exponential_(
        rate, generator=torch.Generator().manual_seed(random.SystemRandom().getrandbits(60))
    )
    return x.copy_(drawn)


def _copies_instead_of_viewing(x: torch.Tensor, dim: int) -> torch.Tensor:
    return _on_host(lambda host: host.unsqueeze(dim).clone(), x)


_plant("sin", _one_element_wrong)
_plant("cos_", _drops_its_write)
_plant("exp", _changes_its_input)
_plant("atan", _nan_for_a_number)
_plant("neg", _infinite)
_plant("floor", _wrong_dtype)
_plant("ceil", _wrong_shape)
_plant("erf", _raises)
_plant("erfinv", _not_there)
_plant("tan", _crashes)
_plant("tanh", _hangs)
_plant("sigmoid_backward", _gradient_off_by_a_factor)
_plant("exponential_", _ignores_the_seed)
_plant("unsqueeze", _copies_instead_of_viewing)
