"""Ranks forked once that run one function after another and count what they send."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import forkserver
import torch
import torch.distributed as dist

DEADLINE_S = 120


class Ranks:
    """Processes that are ranks of one world, over gloo or dicomm."""

    def __init__(self, count: int, backend: str = "gloo") -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.processes, self.pipes = [], []
        context = forkserver.context()
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, self.folder.name, rank, count, backend), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What function(rank, *arguments) gives, by rank. Fails where a rank does."""
        for pipe in self.pipes:
            pipe.send((function, arguments))
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + DEADLINE_S
        while len(answers) < len(self.pipes):
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                rank = self.pipes.index(pipe)
                done, answers[rank] = pipe.recv()
                if not done:
                    self.close()
                    raise AssertionError(f"rank {rank}: {answers[rank]}")
            if not ready:
                self.close()
                raise AssertionError(f"{len(waiting)} ranks are not done after {DEADLINE_S} s")
        return [answers[rank] for rank in range(len(self.pipes))]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _serve(pipe: Connection, folder: str, rank: int, count: int, backend: str) -> None:
    import dicomm.distributed  # noqa: F401  (registers the backend)

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", count)
    deadline = timedelta(seconds=DEADLINE_S)
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=deadline)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:  # pytest is gone
            return
        try:
            pipe.send((True, function(rank, *arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class Counted:
    """Counts, by peer, the bytes that this rank sends while it is entered.

    Over gloo as they are given to torch.distributed, over dicomm as its transports count them.
    """

    def __init__(self) -> None:
        self.sent_bytes: Counter[int] = Counter()
        self.messages = 0

    def __enter__(self) -> Counted:
        self.isend = dist.isend
        self.carried = self._carried()

        def isend(tensor: torch.Tensor, dst: int, *rest: Any, **named: Any) -> Any:
            self.messages += 1
            if self.carried is None:
                self.sent_bytes[dst] += tensor.nbytes
            return self.isend(tensor, dst, *rest, **named)

        dist.isend = isend
        return self

    def __exit__(self, *_: object) -> None:
        dist.isend = self.isend
        if self.carried is not None:
            self.sent_bytes = self._carried() - self.carried

    def _carried(self) -> Counter[int] | None:
        from dicomm.distributed import bytes_sent

        return Counter(bytes_sent()) if dist.get_backend() == "dicomm" else None


def train_plainly(
    module: torch.nn.Module, learning_rate: float, batches: Iterable[tuple[torch.Tensor, ...]]
) -> list[float]:
    """Trains a module that returns its own loss on one device; returns the loss of each batch."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=learning_rate)
    losses = []
    for batch in batches:
        loss = module(*batch)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses
