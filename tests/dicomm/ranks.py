"""Runs a test's ranks: as threads of this process, or as real processes."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import forkserver
import torch.distributed as dist

DEADLINE_S = 90


class Failed(Exception):
    """A rank raised; its traceback is the message."""


def run_threads(world_size: int, function: Callable[[int], Any]) -> list[Any]:
    """function(rank) on every rank at once; results by rank."""
    results: list[Any] = [None] * world_size
    failures: list[str] = []

    def body(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except BaseException:
            failures.append(f"rank {rank}: {traceback.format_exc()}")

    threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(world_size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + DEADLINE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        failures.append(f"not done after {DEADLINE_S} s")
    if failures:
        raise Failed("\n".join(failures))
    return results


class Processes:
    """Ranks as processes with a process group; started by the constructor."""

    def __init__(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        backend: str = "dicomm",
        environment: dict[str, str] | None = None,
    ) -> None:
        # The store outlives any rank, so that a test may kill any of them.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = forkserver.context()
        self._queue = context.Queue()
        self.processes = [
            context.Process(
                target=_rank_main,
                args=(
                    function, args, rank, world_size, self._store.port, backend,
                    environment or {}, self._queue,
                ),
                daemon=True,
            )
            for rank in range(world_size)
        ]  # fmt: skip
        for process in self.processes:
            process.start()

    def outcomes(self, ranks: set[int] | None = None) -> dict[int, tuple[bool, Any]]:
        """rank -> (succeeded, result or traceback), of the ranks asked for; then ends them all."""
        wanted = set(range(len(self.processes))) if ranks is None else ranks
        found: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + DEADLINE_S
        try:
            while set(found) != wanted:
                left = deadline - time.monotonic()
                assert left > 0, f"ranks {wanted - set(found)} not done after {DEADLINE_S} s"
                try:
                    rank, succeeded, value = self._queue.get(timeout=min(left, 1.0))
                except Exception:
                    continue
                found[rank] = (succeeded, value)
        finally:
            for process in self.processes:
                process.join(5)
                process.kill()
        return found


def run_processes(world_size: int, function: Callable[..., Any], *args: Any, **kw: Any) -> list:
    """function(rank, *args) in real processes with a process group; results by rank."""
    outcomes = Processes(world_size, function, *args, **kw).outcomes()
    failures = [f"rank {r}: {text}" for r, (succeeded, text) in outcomes.items() if not succeeded]
    if failures:
        raise Failed("\n".join(failures))
    return [outcomes[rank][1] for rank in range(world_size)]


def _rank_main(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    port: int,
    backend: str,
    environment: dict[str, str],
    queue: Any,
) -> None:
    import torch

    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        import dicomm.distributed  # noqa: F401  (registers the backend)

        dist.init_process_group(
            backend,
            store=dist.TCPStore("127.0.0.1", port, is_master=False),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        value = function(rank, *args)
        dist.destroy_process_group()
        queue.put((rank, True, value))
    except BaseException:
        queue.put((rank, False, traceback.format_exc()))
