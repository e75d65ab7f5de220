"""The ``torch.distributed`` backend "dicomm": one process group over chips of many vendors.

Importing this module registers the backend, for host tensors and for the PrivateUse1 device::

    import dicomm.distributed
    torch.distributed.init_process_group("dicomm")

Environment: ``DICOMM_STRATEGY`` (device-direct or cpu-mediated, the two point-to-point strategies
of the H2 paper), ``DICOMM_RANK_LABEL`` (shown next to the rank in every error, e.g. "chip B") and
``DICOMM_SECRET`` (the job's; without it the first rank of each group draws one and shares it
through torch.distributed's store, which the job trusts anyway).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dicomm import _c10d

STRATEGIES = ("device-direct", "cpu-mediated")


@dataclass(frozen=True)
class Options:
    """``pg_options`` of ``init_process_group`` and ``new_group``.

    strategy: "device-direct" (the transport reads and writes chip memory) or "cpu-mediated"
    (staged through host memory); None: ``DICOMM_STRATEGY``, else device-direct.
    """

    strategy: str | None = None


def register_backend() -> None:
    """Registers "dicomm" with torch.distributed for "cpu" and the PrivateUse1 device.

    Call it again after PrivateUse1 was renamed, so that the new name's default backend is dicomm.
    """
    devices = ["cpu", torch._C._get_privateuse1_backend_name()]
    dist.Backend.register_backend("dicomm", _create, extended_api=True, devices=devices)


def set_device_clock(device_type: str, ready_at_ns: int, wait_until_ns: int) -> None:
    """Shares an emulated chip's clock, so that messages carry it and streams wait by it.

    Args:
        device_type: as in ``torch.device(device_type)``.
        ready_at_ns: address of ``int64_t f(int32_t device_index)``: when the current stream's work
            is done, in CLOCK_MONOTONIC nanoseconds; 0 for both: forget the clock.
        wait_until_ns: address of ``void f(int32_t device_index, int64_t t)``: the current stream
            waits until t.
    """
    _c10d.set_device_clock(device_type, ready_at_ns, wait_until_ns)
    register_backend()


def set_links(group: dist.ProcessGroup | None, links: Mapping[int, tuple[float, float]]) -> None:
    """Paces the links from this rank to its peers in a group, as an emulated NIC would.

    Args:
        group: None for the default group.
        links: global rank of a peer -> (latency in seconds, bandwidth in bytes per second;
            a bandwidth of 0: not paced).
    """
    backend = _backend(group)
    peers = _peers(group)
    for peer, (latency_s, bytes_per_s) in links.items():
        if peer not in peers:
            raise ValueError(f"link to rank {peer}: not one of its peers in the group, {peers}")
        if latency_s < 0 or bytes_per_s < 0:
            raise ValueError(
                f"link to rank {peer}: latency {latency_s} s and bandwidth {bytes_per_s} bytes/s "
                "must not be negative"
            )
        backend.set_link(_group_rank(group, peer), latency_s, bytes_per_s)


def bytes_sent(group: dist.ProcessGroup | None = None) -> dict[int, int]:
    """Payload bytes this rank has sent in a group so far: global rank of the peer -> bytes."""
    backend = _backend(group)
    return {peer: backend.bytes_sent(_group_rank(group, peer)) for peer in _peers(group)}


def _create(base: dist.distributed_c10d._DistributedBackendOptions, options: object) -> object:
    """Called by torch.distributed on every member of a new group."""
    if options is not None and not isinstance(options, Options):
        raise TypeError(
            f"pg_options of a dicomm process group: {type(options).__name__} given, "
            "dicomm.distributed.Options expected"
        )
    strategy = options.strategy if options else None
    strategy = strategy or os.environ.get("DICOMM_STRATEGY") or STRATEGIES[0]
    if strategy not in STRATEGIES:
        raise ValueError(
            f"dicomm strategy is {strategy!r}, expected one of {', '.join(STRATEGIES)} "
            "(DICOMM_STRATEGY or pg_options)"
        )
    global_ranks = base.global_ranks_in_group
    global_rank = global_ranks[base.group_rank] if global_ranks else base.group_rank
    label = os.environ.get("DICOMM_RANK_LABEL")
    return _c10d.Backend(
        store=base.store,
        rank=base.group_rank,
        world_size=base.group_size,
        timeout=base.timeout,
        name=base.group_id,
        rank_label=f"rank {global_rank} ({label})" if label else f"rank {global_rank}",
        secret=_secret(base.store, base.group_rank, base.group_size),
        strategy=strategy,
    )


def _secret(store: dist.Store, rank: int, world_size: int) -> str:
    given = os.environ.get("DICOMM_SECRET")
    if given or world_size == 1:
        return given or ""
    if rank == 0:
        store.set("dicomm/secret", secrets.token_hex(32))
    return store.get("dicomm/secret").decode()


def _backend(group: dist.ProcessGroup | None) -> _c10d.Backend:
    group = group or dist.group.WORLD
    if group is None:
        raise ValueError("torch.distributed is not initialised: no default process group")
    for device in group._device_types:
        backend = group._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        if isinstance(backend, _c10d.Backend):
            return backend
    raise TypeError(f"process group {group.group_name!r} has no dicomm backend")


def _peers(group: dist.ProcessGroup | None) -> list[int]:
    return [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]


def _group_rank(group: dist.ProcessGroup | None, global_rank: int) -> int:
    return dist.get_group_rank(group or dist.distributed_c10d._get_default_group(), global_rank)


register_backend()
