"""torch.distributed's collectives over one tensor, under the names of every supported version."""

from __future__ import annotations

from collections.abc import Sequence

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


def all_to_all(
    output: Tensor,
    rows: Tensor,
    received: Sequence[int],
    sent: Sequence[int],
    group: dist.ProcessGroup,
    wait: bool = True,
) -> dist.Work | None:
    """Sends so many rows to each rank, in turn, and fills output with so many from each.

    wait: until output is filled; else it is, and rows may change, once what is returned was waited
    for.
    """
    splits = list(received), list(sent)
    return dist.all_to_all_single(output, rows, *splits, group=group, async_op=not wait)


def start(
    kind: str, result: Tensor, source: Tensor, group: dist.ProcessGroup | None
) -> dist.Work | None:
    """Starts what the resolver says takes one tensor from source to result; None: nothing moves.

    An all-reduce is in place: its result is its source.
    """
    if kind == "identity":
        return None
    if kind == "all-reduce":
        work = dist.all_reduce(result, group=group, async_op=True)
    elif kind == "reduce-scatter":
        work = _reduce_scatter(result, source, group=group, async_op=True)
    elif kind == "all-gather":
        work = _all_gather(result, source, group=group, async_op=True)
    else:
        raise ValueError(f"{kind} is no collective of one group")
    assert work is not None
    return work
