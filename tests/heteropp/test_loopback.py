"""The store of a job on one machine: nobody can call it from another, and no crowd stops it."""

from __future__ import annotations

import os
import resource
import socket
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from heteropp.runtime.ranks.launch import launch
from heteropp.runtime.ranks.loopback import loopback_store

CROWD = 1000


def listening_at(port: int) -> set[str]:
    """Where the store listens; another process may have the same port at another address."""
    listeners = [each for each in psutil.net_connections("tcp") if each.status == "LISTEN"]
    there = [each for each in listeners if each.laddr.port == port]
    store = next(each.pid for each in there if each.laddr.ip in ("127.0.0.1", "0.0.0.0", "::"))
    return {each.laddr.ip for each in there if each.pid == store}


def test_a_thousand_silent_callers_do_not_keep_the_store_from_answering() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    store = loopback_store()
    assert listening_at(store.port) == {"127.0.0.1"}
    with ExitStack() as crowd:
        for _ in range(CROWD):
            crowd.enter_context(socket.create_connection((store.host, store.port)))
        timeout = timedelta(seconds=5)
        rank = dist.TCPStore(store.host, store.port, is_master=False, timeout=timeout)
        rank.set("key", "value")
        assert store.get("key") == b"value"


def tell_where(folder: str) -> None:
    addresses = listening_at(int(os.environ["MASTER_PORT"]))
    Path(folder, "addresses").write_text(" ".join(sorted(addresses)))


@pytest.mark.long
def test_the_ranks_of_one_machine_meet_at_such_a_store(tmp_path: Path) -> None:
    assert launch(tell_where, str(tmp_path), labels=("rank 0",), logs=tmp_path / "logs") == 0
    assert (tmp_path / "addresses").read_text() == "127.0.0.1"
