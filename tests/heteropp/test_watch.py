"""Watches of one process that follow on each other, and the signals that come meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forkserver
import torch.distributed as dist

from heteropp.training.ranks.control import Control
from heteropp.training.ranks.watch import Watch


def told(logs: Path, number: int, store: dist.Store, heard: Callable[[], None]) -> Watch:
    """Of a world of one rank."""
    store = dist.PrefixStore(str(number), store)
    control = Control(store, 0, 1, 30)
    return Watch(store, control, ["rank 0"], logs, 30, lambda: "", lambda: None, heard)


def hand_over(logs: Path) -> None:
    """One watch after another; a SIGTERM comes whenever a signal would find no watch to take it."""
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    heard, sent = threading.Event(), threading.Event()
    set_wakeup_fd = signal.set_wakeup_fd

    def interrupted(descriptor: int, **settings: bool) -> int:
        before = set_wakeup_fd(descriptor, **settings)
        if descriptor == -1:
            sent.set()
            os.kill(os.getpid(), signal.SIGTERM)
        return before

    watch = told(logs, 0, store, heard.set)
    signal.set_wakeup_fd = interrupted
    for number in range(1, 4):
        before, watch = watch, told(logs, number, store, heard.set)
        before.finish()
        if not sent.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
        assert heard.wait(30)
        heard.clear()
    watch.finish()
    os._exit(0)  # the signal should have ended it


def test_a_signal_is_taken_by_the_watch_that_follows_or_ends_the_process(tmp_path: Path) -> None:
    process = forkserver.context().Process(target=hand_over, args=(tmp_path,))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGTERM
