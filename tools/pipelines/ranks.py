"""Ranks of a measuring tool: processes of this machine that do together what they are told."""

from __future__ import annotations

import multiprocessing
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

DEADLINE_S = 120.0  # of one call

# a server that has imported these once forks the ranks: torch takes seconds to import
IMPORTED = ["torch.distributed.pipelining", "heteropp.runtime.trainer"]


class Failed(Exception):
    """One sentence for the person at the terminal."""


class BadInput(Exception):
    """One sentence about the command line."""


def chosen(transports: list[str] | None) -> list[str]:
    """Returns the transports that are asked for, gloo and dicomm if none is. Raises BadInput."""
    known = ["gloo", "dicomm"]
    for transport in transports or ():
        if transport not in known:
            raise BadInput(f"--transport is {transport}; expected gloo or dicomm")
    return transports or known


class Ranks:
    """A context manager. `join(rank, store)` makes what a rank is, in its own process.

    store: where the ranks meet, a torch.distributed.Store.
    """

    def __init__(self, size: int, join: Callable[[int, Any], Any]) -> None:
        from torch.distributed import TCPStore

        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        # what the libraries of the ranks read as they start
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ.setdefault("DICOMM_SECRET", secrets.token_hex(32))
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, self._store.port, join, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Ranks:
        try:
            self._answers()  # all have joined
        except Failed:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, method: str, *arguments: object) -> list[Any]:
        """What every rank's method returns, by rank. Raises Failed."""
        for pipe in self._pipes:
            with suppress(OSError):  # it has ended; _answers says so
                pipe.send((method, arguments))
        return self._answers()

    def close(self) -> None:
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(5)
            process.kill()
            process.join()

    def _answers(self) -> list[Any]:
        answers = [self._answer(rank) for rank in range(len(self._pipes))]
        for answer in answers:
            if isinstance(answer, Failed):
                raise answer
        return answers

    def _answer(self, rank: int) -> Any:
        try:
            if self._pipes[rank].poll(DEADLINE_S):
                return self._pipes[rank].recv()
        except (EOFError, OSError):
            return Failed(f"the process of rank {rank} ended early")
        return Failed(f"rank {rank} gave no answer within {DEADLINE_S:.0f} s")


def _serve(rank: int, port: int, join: Callable[[int, Any], Any], pipe: Connection) -> None:
    import torch
    from torch.distributed import TCPStore

    from heteropp.runtime.ranks.host_memory import keep_freed_memory

    torch.set_num_threads(1)
    keep_freed_memory()  # as ranks that train do: for every contestant
    try:
        member = join(rank, TCPStore("localhost", port, is_master=False))
        pipe.send(None)
        while (order := pipe.recv()) is not None:
            method, arguments = order
            pipe.send(getattr(member, method)(*arguments))
    except EOFError:
        pass  # the tool is gone
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        pipe.send(Failed(f"rank {rank}: {type(error).__name__}: {lines[0][:300]}"))
    os._exit(0)  # without the goodbyes of ranks to each other: all is measured
