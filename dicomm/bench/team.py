"""A contestant whose ranks are processes that are called from Python."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Protocol

from dicomm.bench.timing import DEADLINE_S, Failed, Order, Timing

# A server that has imported these once forks the ranks: torch takes seconds to import.
_PRELOAD = ["numpy", "torch.distributed", "dicomm.distributed", "dicomm.bench.torch_collectives"]


class Member(Protocol):
    """One rank, in its process."""

    def prepare(self, order: Order) -> Callable[[Order], Timing]: ...
    def close(self) -> None: ...


class TeamSetup(Protocol):
    @property
    def world_size(self) -> int: ...
    def join(self, rank: int) -> Member: ...


class Team:
    """start: "forkserver", or "spawn" for processes that do not begin with torch imported."""

    def __init__(self, name: str, setup: TeamSetup, start: str = "forkserver") -> None:
        context: Any = multiprocessing.get_context(start)
        if start == "forkserver":
            context.set_forkserver_preload(_PRELOAD)
        self.name = name
        self._pipes, self._processes = [], []
        for rank in range(setup.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, setup, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def wait_ready(self) -> None:
        self._answers()

    def measure(self, order: Order) -> Timing:
        """Runs the order on all ranks and returns the times that rank 0 measured."""
        try:
            for pipe in self._pipes:
                pipe.send(order)
        except OSError:
            raise Failed("one of its processes ended early") from None
        timing: Timing = self._answers()[0]
        return timing

    def _answers(self) -> list[Any]:
        answers = [self._answer(rank) for rank in range(len(self._pipes))]
        for answer in answers:
            if isinstance(answer, str):
                raise Failed(answer)
        return answers

    def _answer(self, rank: int) -> Any:
        try:
            if not self._pipes[rank].poll(2 * DEADLINE_S):
                raise Failed(f"rank {rank} gave no answer within {2 * DEADLINE_S:.0f} s")
            return self._pipes[rank].recv()
        except (EOFError, OSError):
            raise Failed(f"the process of rank {rank} ended early") from None

    def close(self) -> None:
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except OSError:
                continue
        for process in self._processes:
            process.join(5)
            process.kill()
            process.join()


def _serve(rank: int, setup: TeamSetup, pipe: Connection) -> None:
    """Answers each order with a Timing, or with a sentence about what went wrong."""
    try:
        member = setup.join(rank)
    except Exception as error:
        pipe.send(_sentence(error))
        return
    pipe.send(None)
    prepared: tuple[tuple[str, int], Callable[[Order], Timing]] | None = None
    while (order := pipe.recv()) is not None:
        try:
            key = (order.kind, order.bytes)
            if prepared is None or prepared[0] != key:
                prepared = None  # frees its memory before more is taken
                prepared = (key, member.prepare(order))
            pipe.send(prepared[1](order))
        except Exception as error:
            pipe.send(_sentence(error))
    with suppress(Exception):  # all is measured, and the other ranks may have left already
        member.close()


def _sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]
