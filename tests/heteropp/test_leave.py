"""The process that has the job's store ends after all that the others ask of the store."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import forkserver
import torch.distributed as dist

from heteropp.process_groups.control import Control
from heteropp.runtime.ranks.loopback import LOOPBACK, loopback_store

RANKS, TIMEOUT_S, HELD_S = 3, 60, 1


class HeldUp(Control):
    """Control of a rank that loses its processor before it hears an answer."""

    def hear(self, key: str) -> str:
        time.sleep(HELD_S)
        return super().hear(key)


def have_store(ports: list[Connection], timeout_s: float) -> None:
    store = loopback_store()
    for pipe in ports:
        pipe.send(store.port)
    control = Control(store, 0, RANKS, timeout_s)
    control.barrier("finish")
    control.leave()


def ask_store(rank: int, port: Connection, dies: bool) -> None:
    store = dist.TCPStore(LOOPBACK, port.recv(), is_master=False)
    kind = HeldUp if rank == RANKS - 1 else Control
    control = kind(store, rank, RANKS, TIMEOUT_S)
    control.barrier("finish")
    if not dies:
        control.leave()


def exit_codes(timeout_s: float, dies: bool) -> list[int | None]:
    context = forkserver.context()
    pipes = [context.Pipe(duplex=False) for _ in range(1, RANKS)]
    ports = [writer for _, writer in pipes]
    processes = [
        context.Process(target=have_store, args=(ports, timeout_s), daemon=True),
        *(
            context.Process(target=ask_store, args=(rank, reader, dies), daemon=True)
            for rank, (reader, _) in enumerate(pipes, 1)
        ),
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT_S)
    return [process.exitcode for process in processes]


def test_a_rank_that_is_held_up_still_hears_that_all_are_done() -> None:
    assert exit_codes(TIMEOUT_S, dies=False) == [0, 0, 0]


def test_nobody_waits_for_ever_for_a_rank_that_has_died() -> None:
    assert exit_codes(2 * HELD_S, dies=True) == [0, 0, 0]
