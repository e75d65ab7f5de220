"""One rank that is called from Python: dicomm.Communicator, or torch.distributed."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from dicomm.bench.timing import DEADLINE_S, Order, Timing, timing_of

Step = Callable[[], object]


@dataclass(frozen=True)
class Setup:
    """How a rank joins the others. api: "python" (dicomm.Communicator) or "torch"
    (torch.distributed with `backend`). nics: a device for each rank; empty: dicomm chooses."""

    api: str
    backend: str
    transport: str
    world_size: int
    folder: str
    secret: str
    nics: tuple[str, ...] = ()

    def join(self, rank: int) -> Rank:
        return Rank(PythonApi(rank, self) if self.api == "python" else TorchApi(rank, self))


def memory(size_bytes: int) -> memoryview:
    """Page-aligned and written once, the same for everyone: the first touch of a page is slow.

    In huge pages where it is long: where in the machine a process gets small ones is chance, on
    which a copy of tens of MiB depends by up to a factor of two.
    """
    pages = mmap.mmap(-1, max(size_bytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    pages.write(bytes(len(pages)))
    return memoryview(pages)[:size_bytes]


class PythonApi:
    """dicomm.Communicator."""

    def __init__(self, rank: int, setup: Setup) -> None:
        import dicomm

        options = {"nics": setup.nics[rank]} if setup.nics else {}
        self._communicator = dicomm.Communicator(
            rank,
            setup.world_size,
            dicomm.FileStore(setup.folder),
            secret=setup.secret,
            transport=setup.transport,
            timeout_s=DEADLINE_S,
            listen_address="127.0.0.1",
            **options,
        )
        self.rank, self.peer = rank, 1 - rank

    def send(self, data: memoryview) -> Step:
        return partial(self._communicator.send, data, self.peer)

    def recv(self, data: memoryview) -> Step:
        return partial(self._communicator.recv, data, self.peer)

    def isend(self, data: memoryview) -> Callable[[], Any]:
        return partial(self._communicator.isend, data, self.peer)

    def irecv(self, data: memoryview) -> Callable[[], Any]:
        return partial(self._communicator.irecv, data, self.peer)

    def close(self) -> None:
        self._communicator.close()


class TorchApi:
    """torch.distributed with backend dicomm or gloo."""

    def __init__(self, rank: int, setup: Setup) -> None:
        if setup.backend == "dicomm":
            import dicomm.distributed  # noqa: F401 (registers the backend)

            os.environ["DICOMM_TRANSPORT"] = setup.transport
            os.environ["DICOMM_SECRET"] = setup.secret
            if setup.nics:
                os.environ["DICOMM_NICS"] = setup.nics[rank]
        os.makedirs(setup.folder, exist_ok=True)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # as dicomm's: both over loopback
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)  # of kernels; the ranks share the cores
        dist.init_process_group(
            setup.backend,
            rank=rank,
            world_size=setup.world_size,
            init_method=f"file://{setup.folder}/group",
            timeout=timedelta(seconds=DEADLINE_S),
        )
        self.rank, self.peer = rank, 1 - rank

    def _tensor(self, data: memoryview) -> Any:
        import torch

        return torch.frombuffer(data, dtype=torch.uint8)

    def send(self, data: memoryview) -> Step:
        import torch.distributed as dist

        return partial(dist.send, self._tensor(data), self.peer)

    def recv(self, data: memoryview) -> Step:
        import torch.distributed as dist

        return partial(dist.recv, self._tensor(data), self.peer)

    def isend(self, data: memoryview) -> Callable[[], Any]:
        import torch.distributed as dist

        return partial(dist.isend, self._tensor(data), self.peer)

    def irecv(self, data: memoryview) -> Callable[[], Any]:
        import torch.distributed as dist

        return partial(dist.irecv, self._tensor(data), self.peer)

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


Api = PythonApi | TorchApi


def latency(api: Api, order: Order) -> Step:
    """One round trip."""
    send, recv = api.send(memory(order.bytes)), api.recv(memory(order.bytes))
    first, second = (send, recv) if api.rank == 0 else (recv, send)

    def step() -> None:
        first()
        second()

    return step


def uni(api: Api, order: Order) -> Step:
    """A window of messages to rank 1, all from one buffer into another, and a byte back."""
    data, answer = memory(order.bytes), memory(1)
    if api.rank == 0:
        start, finish = api.isend(data), api.recv(answer)
    else:
        start, finish = api.irecv(data), api.send(answer)

    def step() -> None:
        for request in [start() for _ in range(order.window)]:
            request.wait()
        finish()

    return step


def bi(api: Api, order: Order) -> Step:
    """A window of messages each way at once."""
    irecv, isend = api.irecv(memory(order.bytes)), api.isend(memory(order.bytes))

    def step() -> None:
        requests = []
        for _ in range(order.window):
            requests += [irecv(), isend()]
        for request in requests:
            request.wait()

    return step


class Rank:
    """Does orders by one of the APIs."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def prepare(self, order: Order) -> Callable[[Order], Timing]:
        step, parts = self._step(order)
        return partial(perform, step, parts)

    def _step(self, order: Order) -> tuple[Step, int]:
        """What is timed, and by how much its time is divided."""
        if order.kind == "latency":
            return latency(self._api, order), 2
        if order.kind == "uni":
            return uni(self._api, order), 1
        if order.kind == "bi":
            return bi(self._api, order), 1
        from dicomm.bench.torch_collectives import rotation  # needs torch

        steps = rotation(order.kind, order.bytes)

        def step() -> None:
            for call in steps:
                call()

        return step, len(steps)

    def close(self) -> None:
        self._api.close()


def perform(step: Step, parts: int, order: Order) -> Timing:
    for _ in range(order.untimed):
        step()
    samples_us = []
    before = time.perf_counter_ns()
    for _ in range(order.count):
        step()
        now = time.perf_counter_ns()
        samples_us.append((now - before) / (1000 * parts))
        before = now
    return timing_of(samples_us)
