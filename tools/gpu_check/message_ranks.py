"""One of two processes that send each other tensors of one GPU, reduce them, or copy them there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from dicomm.bench.ranks import Step, perform
from dicomm.bench.timing import DEADLINE_S, Failed, Order, Timing

DICOMM, GLOO, COPY = "dicomm", "Gloo and copies to the host", "a copy on the device"
WAKING_S = 0.5
GROUPS = (DICOMM, GLOO, COPY)
ALL_REDUCE = "all_reduce"


@dataclass(frozen=True)
class RankSetup:
    """name: of GROUPS. folder: where a group meets. environment: what chooses the chip."""

    name: str
    folder: str
    environment: dict[str, str]

    @property
    def world_size(self) -> int:
        return 1 if self.name == COPY else 2

    def join(self, rank: int) -> Rank:
        os.environ.update({"DICOMM_STRATEGY": "cpu-mediated", **self.environment})
        import torch

        import ditorch

        torch.set_num_threads(1)
        _wake()
        if self.name == COPY:
            return Copying()
        kind = Direct if self.name == DICOMM else ThroughHost
        return kind(rank, _joined(self, rank, ditorch.device_clock()))


def _wake() -> None:
    """Keeps the GPU at work until its clock is as high as it goes."""
    import torch

    side = 512
    product = torch.full((side, side), 1 / side, device="device")
    until_s = time.monotonic() + WAKING_S
    while time.monotonic() < until_s:
        product = product @ product
        torch.accelerator.synchronize()


def _joined(setup: RankSetup, rank: int, clock: tuple[str, int, int] | None) -> int:
    """Joins the group; returns the peer."""
    import torch.distributed as dist

    backend = "gloo"
    if setup.name == DICOMM:
        import dicomm.distributed
        import ditorch

        backend = "dicomm"
        dicomm.distributed.share_chip_memory(ditorch.device.type, ditorch.vendor_library())
        if clock:  # of an emulated chip
            dicomm.distributed.set_device_clock(*clock)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        backend,
        rank=rank,
        world_size=2,
        init_method=f"file://{setup.folder}/{backend}",
        timeout=timedelta(seconds=DEADLINE_S),
    )
    return 1 - rank


class Rank:
    """What all of them share: tensors on the GPU, and steps that end when it has them."""

    parts: Mapping[str, int] = {"latency": 2}  # by which a step's time is divided; else 1

    def prepare(self, order: Order) -> Callable[[Order], Timing]:
        step = self.step(order)

        def whole() -> None:
            import torch

            step()
            torch.accelerator.synchronize()

        whole()  # connects, and touches the memory
        return partial(perform, whole, self.parts.get(order.kind, 1))

    def step(self, order: Order) -> Step:
        raise NotImplementedError

    def close(self) -> None:
        """Leaves the group, if there is one."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()

    @staticmethod
    def tensor(size_bytes: int) -> Any:
        import torch

        return torch.ones(size_bytes, dtype=torch.uint8, device="device")


class Copying(Rank):
    """What no message can be faster than."""

    parts: Mapping[str, int] = {}

    def step(self, order: Order) -> Step:
        source, target = self.tensor(order.bytes), self.tensor(order.bytes)

        def copies() -> None:
            for _ in range(order.window):
                target.copy_(source)

        return copies


class Sending(Rank):
    """A message each way, a window of messages to rank 1 and a byte back, or an all_reduce."""

    def __init__(self, rank: int, peer: int) -> None:
        self.rank, self.peer = rank, peer

    def step(self, order: Order) -> Step:
        if order.kind == ALL_REDUCE:
            return self.reduces(order.bytes)
        if order.kind == "latency":
            out, into = self.tensor(order.bytes), self.tensor(order.bytes)
            send, receive = self.sends(out, 1), self.receives(into, 1)
            first, second = (send, receive) if self.rank == 0 else (receive, send)
        else:
            data, answer = self.tensor(order.bytes), self.tensor(1)
            if self.rank == 0:
                first, second = self.sends(data, order.window), self.receives(answer, 1)
            else:
                first, second = self.receives(data, order.window), self.sends(answer, 1)

        def step() -> None:
            first()
            second()

        return step

    def reduces(self, size_bytes: int) -> Step:
        """Checks the first result, of which others do not differ."""
        import torch

        tensor = torch.full((size_bytes // 4,), 1.0 + 2 * self.rank, device="device")
        step = self.averages(tensor)
        step()
        if not bool((tensor == 2).all()):
            raise Failed("the average of tensors of 1 and of 3 is not 2")
        return step

    def averages(self, tensor: Any) -> Step:
        raise NotImplementedError

    def sends(self, tensor: Any, window: int) -> Step:
        raise NotImplementedError

    def receives(self, tensor: Any, window: int) -> Step:
        raise NotImplementedError


class Direct(Sending):
    """dicomm takes the GPU's tensors as they are."""

    def averages(self, tensor: Any) -> Step:
        import torch.distributed as dist

        return partial(dist.all_reduce, tensor, dist.ReduceOp.AVG)

    def sends(self, tensor: Any, window: int) -> Step:
        import torch.distributed as dist

        return partial(_all, partial(dist.isend, tensor, self.peer), window)

    def receives(self, tensor: Any, window: int) -> Step:
        import torch.distributed as dist

        return partial(_all, partial(dist.irecv, tensor, self.peer), window)


class ThroughHost(Sending):
    """Gloo sends pinned memory of the host, to and from which the GPU's tensors are copied."""

    def averages(self, tensor: Any) -> Step:
        import torch.distributed as dist

        host = self._pinned(tensor)

        def step() -> None:
            host.copy_(tensor)
            dist.all_reduce(host)
            tensor.copy_(host.div_(2))

        return step

    def sends(self, tensor: Any, window: int) -> Step:
        import torch.distributed as dist

        host = self._pinned(tensor)

        def start() -> Any:
            host.copy_(tensor)
            return dist.isend(host, self.peer)

        return partial(_all, start, window)

    def receives(self, tensor: Any, window: int) -> Step:
        import torch.distributed as dist

        host = self._pinned(tensor)

        def step() -> None:
            for work in [dist.irecv(host, self.peer) for _ in range(window)]:
                assert work is not None
                work.wait()
                tensor.copy_(host)

        return step

    @staticmethod
    def _pinned(tensor: Any) -> Any:
        import torch

        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def _all(start: Callable[[], Any], window: int) -> None:
    for work in [start() for _ in range(window)]:
        work.wait()
