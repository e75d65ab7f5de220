"""Groups over chips of several vendors: who is of which vendor, and each vendor's own backend.

Collectives of such a group run on the vendor's own ("native") backend inside a vendor and on
dicomm between vendors; csrc/dicomm/c10d/mixed.h has the details. Any torch.distributed backend can
be native: a vendor plugin's (nccl, hccl, cncl ...), "gloo" for host tensors, or "dicomm" itself.
To try a mixed job on chips of one vendor, give its ranks the names of pretended vendors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

Creation = dist.distributed_c10d._DistributedBackendOptions


@dataclass(frozen=True)
class Vendors:
    """vendor_of: a number for each rank's vendor; native: the own vendor's group, if it has two."""

    vendor_of: list[int]
    native: Any


def meet(
    base: Creation,
    store: dist.Store,
    get: Callable[[str, str], bytes],
    vendor: str,
    native: str,
    native_options: object = None,
) -> Vendors:
    """Tells the other ranks this one's vendor, and makes the native group with those of the same.

    Args:
        base: the mixed group's, as torch.distributed passes it to a backend.
        store: of this group alone.
        get: (key, what is missing without it) -> value in the store, waiting for it.
        vendor: this rank's.
        native: name of the native backend; unused where the vendor has one rank in the group.
        native_options: passed on to a backend that is registered with an extended API.

    Raises:
        ValueError: there is no such backend, or none was named and one is needed.
        torch.distributed.DistStoreError: a rank did not name its vendor in time.
    """
    store.set(f"vendor/{base.group_rank}", vendor)
    if base.group_rank == 0:  # reads for all, as the store would answer so much else
        expected = "(every rank names one or none does)"
        told = [
            get(f"vendor/{rank}", f"the vendor of its rank {rank} {expected}").decode()
            for rank in range(base.group_size)
        ]
        store.set("vendors", json.dumps(told))
    all_told = "the vendors (its rank 0 tells them once all ranks have named theirs)"
    names = json.loads(get("vendors", all_told))
    own = [rank for rank, name in enumerate(names) if name == vendor]
    group = None
    if len(own) > 1:
        if not native:
            raise ValueError(
                f"dicomm: vendor {vendor!r} has {len(own)} ranks in the group and no native "
                "backend: name one (DICOMM_NATIVE or pg_options)"
            )
        group = native_group(
            base, dist.PrefixStore(f"native/{vendor}", store), own, native, native_options
        )
    return Vendors([names.index(name) for name in names], group)


def native_group(
    base: Creation, store: dist.Store, members: list[int], native: str, options: object
) -> Any:
    """A backend of that name for some ranks of the group `base`."""
    rank, size = members.index(base.group_rank), len(members)
    plugin = dist.Backend._plugins.get(native.upper())
    if plugin is None and native == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timeout=base.timeout)
    if plugin is None and native == "nccl" and dist.is_nccl_available():
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = base.timeout
        return dist.ProcessGroupNCCL(store, rank, size, nccl)
    if plugin is None:
        known = ", ".join(sorted({"gloo", *map(str.lower, dist.Backend._plugins)}))
        raise ValueError(f"dicomm: native backend {native!r} is not one of {known}")
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, base.timeout)
    creation = Creation()
    creation.store = store
    creation.group_rank = rank
    creation.group_size = size
    creation.timeout = base.timeout
    creation.group_id = f"{base.group_id}/native"
    ranks = base.global_ranks_in_group or list(range(base.group_size))
    creation.global_ranks_in_group = [ranks[member] for member in members]
    return plugin.creator_fn(creation, options)
