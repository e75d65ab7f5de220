"""Faults planted in an emulated chip, below every tool: `python planted.py FAULTS script.py ...`.

Each replaces one kernel of the chip by Python that computes on the host, almost right. The script
is run unmodified; the host's own kernels, which fallback and references use, are left as they are.
"""

from __future__ import annotations

import os
import runpy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ditorch

GUILTY_LAYER = 1


def mm_accumulates_in_bfloat16(a: Tensor, b: Tensor) -> Tensor:
    """Wrong accumulation in one shape only: the head's, from 32 wide to 64 tokens."""
    if (a.shape[1], b.shape[1]) != (32, 64):
        return (a.cpu() @ b.cpu()).to(a.device)
    a_host, b_host = a.cpu(), b.cpu()
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16)
    for k in range(0, a.shape[1], 4):
        total = (
            total.float() + a_host[:, k : k + 4].float() @ b_host[k : k + 4].float()
        ).bfloat16()
    return total.to(a.device, a.dtype)


def softmax_without_maximum(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    powers = x.cpu().exp()  # overflows
    return (powers / powers.sum(dim, keepdim=True)).to(x.device)


def silu_backward_off_in_one_layer() -> Callable[..., Tensor]:
    """Three times the gradient, in the layer that calls silu second."""
    layers: list[nn.Module] = []
    first_node = 0  # of autograd's nodes made in the guilty layer's forward
    last_node = 0

    def enter(module: nn.Module, _: Any) -> None:
        nonlocal first_node
        if type(module).__name__ == "FeedForward":
            layers.append(module) if module not in layers else None
            if layers.index(module) == GUILTY_LAYER:
                first_node = torch.autograd._get_sequence_nr()

    def leave(module: nn.Module, *_: Any) -> None:
        nonlocal last_node
        if module in layers and layers.index(module) == GUILTY_LAYER:
            last_node = torch.autograd._get_sequence_nr()

    nn.modules.module.register_module_forward_pre_hook(enter)
    nn.modules.module.register_module_forward_hook(leave)

    def silu_backward(gradient: Tensor, x: Tensor) -> Tensor:
        right = torch.ops.aten.silu_backward(gradient.cpu(), x.cpu())
        node = torch._C._current_autograd_node()
        guilty = node is not None and first_node <= node._sequence_nr() < last_node
        return (right * (3.0 if guilty else 1.0)).to(x.device)

    return silu_backward


def masked_fill_drops_its_write(x: Tensor, mask: Tensor, value: Any) -> Tensor:
    return x


def silu_has_wrong_elements(x: Tensor) -> Tensor:
    """One element in 2,000 is 5% off: a mean over all of them is 0.0025% off."""
    right = torch.nn.functional.silu(x.cpu()).contiguous()
    right.view(-1)[::2000] *= 1.05
    return right.to(x.device)


def sum_overflows_on_one_rank(
    x: Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Rank 1's sums of half precision add large numbers first, in half precision."""
    host = x.cpu()
    if x.dtype is not torch.float16 or os.environ.get("RANK") != "1":
        return torch.ops.aten.sum.dim_IntList(host, dim, keepdim, dtype=dtype).to(x.device)
    positive, negative = host.clamp(min=0).float(), host.clamp(max=0).float()
    parts = [part.sum(dim or None, keepdim=keepdim).half() for part in (positive, negative)]
    return (parts[0] + parts[1]).to(x.device)  # inf - inf


FAULTS: dict[str, tuple[str, Callable[[], Callable[..., Tensor]]]] = {
    "accumulation": ("mm", lambda: mm_accumulates_in_bfloat16),
    "softmax": ("_softmax", lambda: softmax_without_maximum),
    "backward": ("silu_backward", silu_backward_off_in_one_layer),
    "in-place": ("masked_fill_.Scalar", lambda: masked_fill_drops_its_write),
    "elements": ("silu", lambda: silu_has_wrong_elements),
    "overflow": ("sum.dim_IntList", lambda: sum_overflows_on_one_rank),
}


def plant(fault: str) -> torch.library.Library:
    """Replaces an operator of the chip by a faulty one while the returned library lives."""
    operator, make = FAULTS[fault]
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings(action="ignore"):  # torch warns of the kernel it replaces
        library.impl(operator, make(), "PrivateUse1")
    return library


if __name__ == "__main__":
    assert ditorch.vendor() in ("emuchip", "cpu")
    planted = [plant(fault) for fault in sys.argv[1].split("+")]
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
