"""torch.distributed's collectives over one tensor, under the names of every supported version."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

# torch 2.13 renames them and warns at the old names
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(output: Tensor, piece: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fills output [n * size, ...] with every rank's piece [n, ...], in rank order."""
    _all_gather(output, piece, group=group)


def reduce_scatter(output: Tensor, whole: Tensor, group: dist.ProcessGroup) -> None:
    """Sums whole [n * size, ...] over the group; each rank gets its own part, [n, ...]."""
    _reduce_scatter(output, whole, group=group)


def start_all_gather(output: Tensor, piece: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """The same as all_gather, to be waited for."""
    work = _all_gather(output, piece, group=group, async_op=True)
    assert work is not None
    return work


def start_reduce_scatter(output: Tensor, whole: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """The same as reduce_scatter, to be waited for."""
    work = _reduce_scatter(output, whole, group=group, async_op=True)
    assert work is not None
    return work
