"""The ``torch.distributed`` backend "dicomm": one process group over chips of many vendors.

Importing this module registers the backend, for tensors of the host, of the chips that torch knows
by itself (cuda, xpu), and of the PrivateUse1 device::

    import dicomm.distributed
    torch.distributed.init_process_group("dicomm")

Environment: ``DICOMM_STRATEGY`` (device-direct or cpu-mediated, the two point-to-point strategies
of the H2 paper; may differ between ranks), ``DICOMM_TRANSPORT`` (auto, shm, tcp or verbs) and what
else can be set about verbs (``DICOMM_NICS``, ``DICOMM_GID_INDEX`` ...), ``DICOMM_LISTEN_ADDRESS``
(where other machines reach this one), ``DICOMM_SOCKET_IFNAME`` (the interface that it is on;
without it GLOO_SOCKET_IFNAME's or NCCL_SOCKET_IFNAME's, else that which leads to the job's store),
``DICOMM_RANK_LABEL`` (shown next to the rank in every error, e.g. "chip B") and ``DICOMM_SECRET``,
or ``DICOMM_SECRET_FILE`` (the job's secret, or a file of mode 600 with it; without them the first
rank of the default group draws one and shares it through torch.distributed's store, which whoever
reaches its port can read).

Groups that are made after the default one use its connections and its thread, so that they cost
next to nothing; one whose options ask for other connections (a transport, say, or a secret) has its
own.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from dicomm import _c10d, mixed
from dicomm.secret import given_secret

# whether they are here or not: asking would start their drivers, and a fork could not use them
BUILT_IN = ("cpu", "cuda", "xpu")
STRATEGIES = ("device-direct", "cpu-mediated")
TRANSPORTS = tuple(_c10d.transport_names())
PARENTS_SECRET = "the default group's"  # in the store, in place of a secret
# the libraries' own names: a rank listens on the interface that the first of them chooses
INTERFACE_VARIABLES = ("DICOMM_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Options:
    """``pg_options`` of ``init_process_group`` and ``new_group``; None: the environment's choice.

    strategy: "device-direct" (the transport reads and writes chip memory; the default) or
        "cpu-mediated" (staged through host memory).
    transport: "auto" (shared memory within a host, else RDMA where both sides have it, else TCP;
        the default), "shm", "tcp" or "verbs".
    chip: the PCI address of this rank's chip, to choose the nearest NICs for.
    nics: ``device[:port],...`` instead of that choice.
    listen_address: the address at which other machines reach this one; by default that of the
        interface which DICOMM_SOCKET_IFNAME, GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names, else
        of that which leads to the job's store, or, where the store is on this machine's
        loopback, what this host's name resolves to.
    node: the name of this rank's node, for collectives over several; by default the host.
    vendor: the name of this chip's vendor. Set on every rank or on none: then collectives run on
        each vendor's own backend inside the vendor and on dicomm between vendors (dicomm.mixed).
    native: the name of that backend, such as "nccl", "hccl" or, for host tensors, "gloo".
    """

    strategy: str | None = None
    transport: str | None = None
    chip: str | None = None
    nics: str | None = None
    listen_address: str | None = None
    node: str | None = None
    vendor: str | None = None
    native: str | None = None
    is_native: bool = field(default=False, repr=False)  # inside a vendor: nothing more to compose

    def chosen(self, name: str, choices: tuple[str, ...] = ()) -> str:
        """This option, else the environment's, else the first of the choices."""
        variable = f"DICOMM_{name.upper()}"
        value = getattr(self, name) or os.environ.get(variable) or (choices[0] if choices else "")
        if choices and value not in choices:
            raise ValueError(
                f"dicomm {name} is {value!r}, expected one of {', '.join(choices)} "
                f"({variable} or pg_options)"
            )
        return value


def register_backend() -> None:
    """Registers "dicomm" with torch.distributed for BUILT_IN devices and the PrivateUse1 device.

    Call it again after PrivateUse1 was renamed, so that the new name's default backend is dicomm.
    Devices that have a default backend, as cuda has NCCL, keep it.
    """
    devices = [*BUILT_IN, torch._C._get_privateuse1_backend_name()]
    dist.Backend.register_backend("dicomm", create, extended_api=True, devices=devices)


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


def device_memory_functions() -> tuple[int, int]:
    """Returns the addresses of two C functions for a chip's allocator to call.

    It calls ``void taken(int32_t device, uint64_t address, uint64_t bytes)`` for each block of chip
    memory that it holds, and ``returned`` (the same arguments) before the chip gets one back.
    Network cards then register that memory once, and not for every message.
    """
    return _c10d.device_memory_functions()


def share_chip_memory(device_type: str, library: str | None = None) -> bool:
    """Lets large messages between processes of one host go from chip to chip, and chips reduce.

    They do where all ranks call this before they make the process group, for chips of one device
    type, and are CPU-mediated: the receiver's chip then copies from the sender's memory, each chip
    of a reduction adds up what the others hold, and the host copies nothing. Other messages and
    collectives go as without it.

    Args:
        device_type: as in ``torch.device(device_type)``.
        library: path of the chip vendor's library, which implements ditorch's runtime ABI. None:
            the chip's driver has a way of its own, which is known for NVIDIA's GPUs.

    Returns:
        Whether the vendor has that: the ABI's memory_export and memory_import are optional.

    Raises:
        ValueError: it is no such library.
    """
    return _c10d.share_chip_memory(device_type, library or "")


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


def monitored_barrier(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """A barrier whose error names the ranks that did not come in time.

    ``torch.distributed.monitored_barrier`` is the same, but takes no backend other than Gloo.

    Args:
        group: None for the world's.
        timeout: None for the group's.
        wait_all_ranks: name every missing rank, not just the first.

    Raises:
        torch.distributed.DistBackendError: on every rank; the group is aborted.
    """
    backend = _backend(group)
    unset = timedelta(milliseconds=-1)
    backend.monitored_barrier(unset if timeout is None else timeout, wait_all_ranks)


def create(base: dist.distributed_c10d._DistributedBackendOptions, options: object) -> object:
    """Called by torch.distributed on every member of a new group.

    The distribution's entry point "torch.distributed.backends" names it, for programs that need a
    backend for a chip's tensors and have not imported this module.
    """
    if options is not None and not isinstance(options, Options):
        raise TypeError(
            f"pg_options of a dicomm process group: {type(options).__name__} given, "
            "dicomm.distributed.Options expected"
        )
    options = options or Options()
    strategy = options.chosen("strategy", STRATEGIES)
    transport = options.chosen("transport", TRANSPORTS)
    store = _fresh(base.store, base.group_size)
    global_ranks = base.global_ranks_in_group
    global_rank = global_ranks[base.group_rank] if global_ranks else base.group_rank
    parent = _parent() if global_ranks else None  # else it spans jobs: no part of the default group
    label = os.environ.get("DICOMM_RANK_LABEL")
    vendor = options.chosen("vendor")
    vendors = mixed.Vendors([], None)
    if vendor and not options.is_native:
        vendors = mixed.meet(
            base,
            store,
            lambda key, what: _get(store, key, base.timeout, what),
            vendor,
            options.chosen("native"),
            replace(options, is_native=True) if options.chosen("native") == "dicomm" else None,
        )
    return _c10d.Backend(
        store=store,
        rank=base.group_rank,
        world_size=base.group_size,
        timeout=base.timeout,
        name=base.group_id,
        rank_label=f"rank {global_rank} ({label})" if label else f"rank {global_rank}",
        secret=_secret(store, base, parent),
        strategy=strategy,
        transport=transport,
        listen_address=options.chosen("listen_address")
        or ("" if parent else _address_towards(base.store)),
        chip=options.chosen("chip"),
        nics=options.chosen("nics"),
        node=options.chosen("node"),
        vendor_of=vendors.vendor_of,
        native=vendors.native,
        parent=parent,
        ranks=global_ranks,
    )


def _parent() -> _c10d.Backend | None:
    """The default group's backend, whose connections each later group shares."""
    with contextlib.suppress(TypeError, ValueError):
        return _backend(None)
    return None


def _fresh(store: dist.Store, world_size: int) -> dist.Store:
    """A part of the store where no earlier group of this name left anything.

    A process group made anew on the same store has its predecessor's name: it is told apart by
    how many members came before.
    """
    generation = (store.add("dicomm/members", 1) - 1) // world_size
    return dist.PrefixStore(f"dicomm/{generation}", store)


def _address_towards(store: dist.Store) -> str:
    """This machine's address on the way to the store, which the other machines reach as well.

    Empty where an interface is chosen, the way is the loopback, or the store has no address.
    """
    if any(map(os.environ.get, INTERFACE_VARIABLES)):
        return ""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return ""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(
            store.host, store.port, type=socket.SOCK_DGRAM
        ):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)  # chooses a route, and sends nothing
                own = ipaddress.ip_address(probe.getsockname()[0])
                if not (own.is_loopback or own.is_link_local):
                    return str(own)
    return ""


def _secret(
    store: dist.Store,
    base: dist.distributed_c10d._DistributedBackendOptions,
    parent: _c10d.Backend | None,
) -> str:
    """The new group's secret; empty where it is the parent's."""
    given, rank = given_secret(), base.group_rank
    if base.group_size == 1:
        return given
    if rank == 0:
        drawn = PARENTS_SECRET if parent else secrets.token_hex(32)
        store.set("secret", "" if given else drawn)
    shared = given or _get(store, "secret", base.timeout, "the secret of its rank 0").decode()
    if not shared:
        raise dist.DistBackendError(
            f"dicomm: DICOMM_SECRET is set for rank 0 of the new process group and not for rank "
            f"{rank}; expected the same for every rank, or for none"
        )
    return "" if shared == PARENTS_SECRET else shared


def _get(store: dist.Store, key: str, timeout: timedelta, what: str) -> bytes:
    """Polls: a blocking get would lock the store's one connection, and with it other threads."""
    deadline = time.monotonic() + timeout.total_seconds()
    pause_s = 0.0002
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise dist.DistStoreError(
                f"dicomm: the new process group lacks {what} after {timeout.total_seconds():.0f} s"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)
    return store.get(key)


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
