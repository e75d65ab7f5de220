"""One rank of the strategies' benchmark: an emulated chip that plays ping-pong by its own clock."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from dicomm.bench.chips import ChipLink
from dicomm.bench.timing import DEADLINE_S, Failed, Order, Timing, timing_of


@dataclass(frozen=True)
class ChipSetup:
    """chips: a chip file for each rank. links: by strategy."""

    chips: tuple[str, str]
    links: dict[str, ChipLink]
    folder: str
    world_size: int = 2

    def join(self, rank: int) -> ChipRank:
        return ChipRank(rank, self)


class ChipRank:
    def __init__(self, rank: int, setup: ChipSetup) -> None:
        # torch loads ditorch, which brings the emulated chip: dicomm itself never imports it.
        os.environ |= {"DITORCH_AUTOLOAD": "1", "DITORCH_CHIP": setup.chips[rank]}
        os.environ.pop("DITORCH_VENDOR", None)
        import torch
        import torch.distributed as dist

        import dicomm.distributed

        ditorch = sys.modules.get("ditorch")
        device_clock = ditorch.device_clock() if ditorch else None
        if device_clock is None:
            raise Failed("ditorch brought no emulated chip")
        dicomm.distributed.set_device_clock(*device_clock)
        self.device, ready_at_ns, _ = device_clock
        self._ready_at_ns = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int32)(ready_at_ns)
        torch.set_num_threads(1)
        timeout = timedelta(seconds=DEADLINE_S)
        dist.init_process_group(
            "dicomm",
            rank=rank,
            world_size=2,
            init_method=f"file://{setup.folder}/group",
            timeout=timeout,
        )
        self.rank, self.peer = rank, 1 - rank
        self.groups = {}
        for strategy, link in setup.links.items():
            group = dist.new_group(
                backend="dicomm",
                timeout=timeout,
                pg_options=dicomm.distributed.Options(strategy=strategy),
            )
            dicomm.distributed.set_links(group, {self.peer: (link.latency_s, link.bytes_per_s)})
            self.groups[strategy] = group

    def prepare(self, order: Order) -> Callable[[Order], Timing]:
        """Round trips with the strategy that is the order's kind."""
        import torch
        import torch.distributed as dist

        group = self.groups[order.kind]
        out = torch.ones(order.bytes, dtype=torch.uint8, device=self.device)
        into = torch.ones(order.bytes, dtype=torch.uint8, device=self.device)
        send = partial(dist.send, out, self.peer, group=group)
        recv = partial(dist.recv, into, self.peer, group=group)
        first, second = (send, recv) if self.rank == 0 else (recv, send)

        def step() -> None:
            first()
            second()

        step()  # connects, and touches the memory
        return partial(self._perform, step)

    def _perform(self, step: Callable[[], None], order: Order) -> Timing:
        """Half round trips by the chip's clock, of which the host may be well ahead."""
        import torch

        samples_us = []
        for _ in range(order.count):
            torch.accelerator.synchronize()
            before = self._now_ns()
            step()
            samples_us.append((self._now_ns() - before) / 2000)
        return timing_of(samples_us)

    def _now_ns(self) -> int:
        """When the chip could start what is submitted now."""
        return max(self._ready_at_ns(0), time.monotonic_ns())

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()
