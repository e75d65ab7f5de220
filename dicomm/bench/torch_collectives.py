"""The collectives of torch.distributed, as calls on vectors of one length."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from dicomm.bench.ranks import Step, memory

FLOAT32_BYTES = 4
# By their names of torch 2.13 on, or before.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _floats(count: int) -> torch.Tensor:
    return torch.frombuffer(memory(count * FLOAT32_BYTES), dtype=torch.float32)


def rotation(name: str, size_bytes: int) -> list[Step]:
    """One call for each rank as the root, so that a root cannot run ahead of the others: it soon
    waits for what another root gives. Without roots, a single call.

    size_bytes: of the vector that the whole group works on (all of allreduce's, the gathered one
    of allgather, the one that scatter cuts up), rounded up to a float32 for each rank.
    """
    size = dist.get_world_size()
    part_count = max(1, -(-size_bytes // (FLOAT32_BYTES * size)))
    whole, other = _floats(part_count * size), _floats(part_count * size)
    part = whole[:part_count]
    if name == "barrier":
        return [dist.barrier]
    if name == "allreduce":
        return [partial(dist.all_reduce, whole)]
    if name == "allgather":
        return [partial(_all_gather, other, part)]
    if name == "reduce_scatter":
        return [partial(_reduce_scatter, other[:part_count], whole)]
    if name == "alltoall":
        return [partial(dist.all_to_all_single, other, whole)]
    return [_rooted(name, root, whole, other, part) for root in range(size)]


def _rooted(
    name: str, root: int, whole: torch.Tensor, other: torch.Tensor, part: torch.Tensor
) -> Step:
    is_root = dist.get_rank() == root
    size = dist.get_world_size()
    if name == "broadcast":
        return partial(dist.broadcast, whole, root)
    if name == "reduce":
        return partial(dist.reduce, whole, root)
    if name == "gather":
        parts = list(other.chunk(size)) if is_root else None
        return partial(dist.gather, part, parts, root)
    if name == "scatter":
        parts = list(other.chunk(size)) if is_root else None
        return partial(dist.scatter, part, parts, root)
    raise ValueError(f"collective {name!r} is not one that dicomm-bench knows")
