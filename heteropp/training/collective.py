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
