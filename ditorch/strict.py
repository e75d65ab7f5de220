"""DITORCH_STRICT=1: what the host would compute in the chip's stead is an error.

An accelerator on which operators silently go to the host is slow for no visible reason. Strict mode
raises NotImplementedError instead, which names the operator, the dtypes and the module.
"""

from __future__ import annotations

import os
from threading import local
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from ditorch import _ditorch

_names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


class _Entered(local):
    """The modules whose forward the thread is in, the innermost last."""

    def __init__(self) -> None:
        self.modules: list[str] = []


_entered = _Entered()


def follow_environment(is_made_here: bool) -> None:
    """Turns strict mode on if DITORCH_STRICT asks for it.

    is_made_here: whether the device is ditorch's own; a device of torch's has no host fallback.
    Raises ImportError for a value other than 0 or 1.
    """
    wanted = os.environ.get("DITORCH_STRICT", "0")
    if wanted not in ("0", "1"):
        raise ImportError(f"DITORCH_STRICT is {wanted!r}, expected 0 or 1")
    if wanted == "1" and is_made_here:
        _ditorch.set_strict(True)
        register_module_forward_pre_hook(_enter)
        register_module_forward_hook(_leave, always_call=True)


def _enter(module: nn.Module, _: Any) -> None:
    if not _entered.modules:
        for name, part in module.named_modules(prefix=type(module).__name__):
            _names.setdefault(part, name)
    _entered.modules.append(_names.get(module, type(module).__name__))
    _ditorch.set_module(_entered.modules[-1])


def _leave(module: nn.Module, inputs: Any, result: torch.Tensor) -> None:
    _entered.modules.pop()
    _ditorch.set_module(_entered.modules[-1] if _entered.modules else "")
