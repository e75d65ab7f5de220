from datetime import timedelta

import torch.distributed as dist

def transport_names() -> list[str]: ...

class Backend(dist.distributed_c10d.Backend):  # type: ignore[misc]
    def __init__(
        self,
        *,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        name: str,
        rank_label: str,
        secret: str,
        strategy: str,
        transport: str,
        listen_address: str,
        chip: str = "",
        nics: str = "",
        node: str = "",
        vendor_of: list[int] = ...,
        native: dist.distributed_c10d.Backend | None = None,
        parent: Backend | None = None,
        ranks: list[int] = ...,
    ) -> None: ...
    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool) -> None: ...
    def set_link(self, peer: int, latency_s: float, bytes_per_s: float) -> None: ...
    def bytes_sent(self, peer: int) -> int: ...

class MixedBackend(Backend): ...

def set_device_clock(device_type: str, ready_at_ns: int, wait_until_ns: int) -> None: ...
def share_chip_memory(device_type: str, library: str) -> bool: ...
def device_memory_functions() -> tuple[int, int]: ...
