"""Which calls draw random numbers, where a device draws other ones than the host."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ditorch
from ditorch.conform.variants import SampleCall


@cache
def draws_as_the_host() -> bool:
    """Whether an equal seed gives this process's device the host's random numbers."""
    found = []
    for device in ("cpu", ditorch.device):
        torch.manual_seed(0)
        found.append(torch.rand(64, device=device).cpu())
    return torch.equal(*found)


def draws(call: SampleCall) -> bool:
    """Whether an operator draws random numbers on the host.

    The state that it leaves does not always tell: some of the database's operators put it back.
    """
    with _DrawWatch() as watch, suppress(Exception):  # whatever it raises here is not judged
        call.operator.op(call.input, *call.args, **call.kwargs)
    return watch.drew


class _DrawWatch(TorchDispatchMode):
    drew = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.drew |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))
