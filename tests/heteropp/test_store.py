"""Calls of the job's store when its machine vanishes without a word."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path

import forkserver
import machines
import pytest
import torch.distributed as dist
from installed import NAMESPACES
from lab import lab

from heteropp.runtime.ranks.store import is_here, limit_answers

PORT = 29500
LIMIT_S = 2.0


def keep_store(machine: int, pipe: Connection) -> None:
    machines.enter(machine)
    store = dist.TCPStore(f"{machines.NETWORK}.1", PORT, is_master=True, wait_for_workers=False)
    pipe.send(is_here(store))
    pipe.recv()


def ask_store(machine: int, pipe: Connection) -> None:
    machines.enter(machine)
    store = dist.PrefixStore("job", dist.TCPStore(f"{machines.NETWORK}.1", PORT, is_master=False))
    limit_answers(store, LIMIT_S)
    store.set("key", "value")
    pipe.send(is_here(store))
    pipe.recv()
    with pytest.raises(dist.DistNetworkError):
        store.check(["key"])
    pipe.send("ended")


@pytest.mark.skipif(os.geteuid() != 0, reason="{}; {} runs it".format(*NAMESPACES))  # to enter
def test_a_call_ends_though_the_store_s_machine_has_vanished(tmp_path: Path) -> None:
    context = forkserver.context()
    with lab(2, tmp_path) as there:
        (ours, theirs), (asking, answering) = context.Pipe(), context.Pipe()
        first, second = (machine.namespaces.first for machine in there)
        store = context.Process(target=keep_store, args=(first, theirs), daemon=True)
        store.start()
        assert ours.poll(60)
        assert ours.recv() is True
        client = context.Process(target=ask_store, args=(second, answering), daemon=True)
        client.start()
        assert asking.poll(60)
        assert asking.recv() is False
        there[0].cut_off()
        asking.send("go on")
        assert asking.poll(60)
        assert asking.recv() == "ended"
        client.join(30)
        store.kill()
        store.join(30)
