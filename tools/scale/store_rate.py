"""How many requests a second torch's store serves, which all ranks of a job share."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection

import torch.distributed as dist

from heteropp.runtime.ranks.loopback import LOOPBACK, loopback_store
from scale import Failed

CLIENTS = 4
REQUESTS = 10_000  # of each
ANSWER_S = 120.0


def requests_per_s() -> float:
    """Measures it by the CPU time of a store that others ask: a job's has a core for itself.

    Raises Failed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe()
    keeper = context.Process(target=_keep, args=(theirs,), daemon=True)
    keeper.start()
    port = _answer(ours)
    clients = [context.Process(target=_ask, args=(port, i), daemon=True) for i in range(CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(ANSWER_S)
        if client.exitcode != 0:
            raise Failed(f"clients of a store did not end well within {ANSWER_S:g} s")
    ours.send("")
    cpu_s = _answer(ours)
    keeper.join()
    return CLIENTS * REQUESTS / cpu_s


def _keep(pipe: Connection) -> None:
    store = loopback_store()
    pipe.send(store.port)
    begun_s = time.process_time()
    pipe.recv()
    pipe.send(time.process_time() - begun_s)


def _ask(port: int, number: int) -> None:
    store = dist.TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False)
    key = f"key {number}"
    store.set(key, "as long as the contact of a rank may be " * 4)
    for _ in range(REQUESTS):
        store.compare_set(key, "nothing", "nothing")  # as ranks look for what others wrote


def _answer(pipe: Connection) -> float:
    if not pipe.poll(ANSWER_S):
        raise Failed(f"a store has not answered for {ANSWER_S:g} s")
    return pipe.recv()
