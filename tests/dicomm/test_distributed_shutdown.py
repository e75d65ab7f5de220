"""Leaving a group whose last messages nobody waited for."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from ranks import run_threads

from dicomm import _c10d
from dicomm.distributed import register_backend


def pair() -> list[Any]:
    """The ranks of a group of two, as threads of this process."""
    register_backend()
    store = dist.HashStore()
    return run_threads(
        2,
        lambda rank: _c10d.Backend(
            store=store, rank=rank, world_size=2, timeout=timedelta(seconds=8), name="leaving",
            rank_label="", secret="of the test", strategy="device-direct", transport="auto",
            listen_address="",
        ),
    )  # fmt: skip


def test_a_send_may_be_dropped_while_another_thread_waits_for_those_before() -> None:
    sender, receiver = pair()
    messages = [torch.full((1 << 20,), float(i)) for i in range(2)]
    works = [sender.send([message], 1, i) for i, message in enumerate(messages)]
    works.pop(0)  # nobody waits for it: shutdown() will
    leaving = threading.Thread(target=sender.shutdown)
    leaving.start()
    leaving.join(0.2)  # it is waiting by now
    works.clear()  # must not wait for that, which waits for what follows
    for i, message in enumerate(messages):
        received = torch.zeros_like(message)
        receiver.recv([received], 0, i).wait()
        assert torch.equal(received, message)
    leaving.join()
    receiver.shutdown()
