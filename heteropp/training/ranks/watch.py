"""Ends a rank when the job cannot go on, with one line that names the first cause.

A thread watches what the main thread, deep in a kernel or a wait, cannot: the deaths of the other
ranks of this machine and of the launcher, and a cause that any rank of the job wrote to the store.
The first cause to reach the store is the one that every rank names. Each rank also listens for the
heartbeat of the one before it: a process that is paused, or a machine that is gone, dies silently.

A SIGTERM ends nothing by itself: `told_to_stop` is for the main thread, which finishes its step.
Where members outlive a plan it is a notice for the member's chip alone. A watch that is begun
before another one of this process has finished takes its signals over.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from heteropp.files import FileError, write_text
from heteropp.training.ranks.control import Control

POLL_S = 1.0  # of the store: causes and heartbeats
SILENCE_S = 10.0  # after which a rank that is not heard is named
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LAUNCHER = -1  # stands for it where a rank is expected
CAUSE_FILE = "cause"  # in the logs, for the launcher


class Watch:
    newest: Watch | None = None  # of this process: it has the signals

    def __init__(
        self,
        store: dist.Store,
        control: Control,
        labels: list[str],
        logs: Path,
        deadline_s: float,
        doing: Callable[[], str],
        on_exit: Callable[[], None],
        notice: Callable[[], None] | None = None,
    ) -> None:
        """Starts watching; every rank of the job must.

        `labels` by rank, "rank 3 (chip B)"; deadline_s: how long a rank may be silent; notice: what
        a SIGTERM leads to, in the watch's thread; None: all ranks are told to stop.
        """
        self.rank, self.labels, self.logs = control.rank, labels, logs
        self.deadline_s, self.doing, self.on_exit = deadline_s, doing, on_exit
        # a connection of its own: the main thread may hold the other in a wait
        self.store = dist.PrefixStore("watch", store.clone())  # type: ignore[attr-defined]
        self.store.set_timeout(timedelta(seconds=10))
        self.notice = notice or (lambda: self.store.set("stop", ""))
        self.ending = threading.Lock()
        self.finished = threading.Event()
        self.told_to_stop = False  # some rank was
        self.neighbour = Neighbour((control.rank - 1) % control.world_size)
        self.wakeup, self.wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self.wakeup_write, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)  # the thread below reads it from the pipe
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # which a member held back until now
        Watch.newest = self
        control.publish("process", json.dumps([_machine(), os.getpid()]))
        self.peers: dict[int, int] = {}  # file descriptor of the process: rank
        for rank, text in enumerate(control.collect("process")):
            machine, process = json.loads(text)
            if rank != self.rank and machine == _machine():
                self._watch_process(process, rank)
        launcher = multiprocessing.parent_process()
        self._watch_process((launcher and launcher.pid) or os.getppid(), LAUNCHER)
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def finish(self) -> None:
        """This rank has done its part; its end, and the others', are no longer a failure."""
        self.store.set(f"finished/{self.rank}", "")
        if Watch.newest is self:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)  # before the thread closes it
        self.finished.set()

    def fail(self, what: str, wait_s: float = 1.0) -> None:
        """Ends this process because of an error here; does not return.

        An error of communication is mostly another rank's death: the watch gets a moment to say so.
        """
        time.sleep(wait_s)
        self._end({"rank": self.rank, "what": what})

    def _watch_process(self, process: int, rank: int) -> None:
        try:
            self.peers[os.pidfd_open(process)] = rank
        except ProcessLookupError:
            self._end({"rank": rank, "what": "died"})

    def _watch(self) -> None:
        poll = select.poll()
        for descriptor in (*self.peers, self.wakeup):
            poll.register(descriptor, select.POLLIN)
        while not self.finished.is_set():
            ready = {descriptor for descriptor, _ in poll.poll(POLL_S * 1000)}
            for descriptor in ready & self.peers.keys():
                rank = self.peers[descriptor]
                poll.unregister(descriptor)
                if not self._has_finished(rank):
                    self._end({"rank": rank, "what": "died"})
            try:
                self._take_signals()
                self._read_store()
            except dist.DistNetworkError:
                self._end({"rank": LAUNCHER, "what": "died"})  # and the store with it
        with contextlib.suppress(RuntimeError):  # the launcher may have ended
            self._take_signals()  # that came before another watch had them
        for descriptor in (*self.peers, self.wakeup, self.wakeup_write):
            os.close(descriptor)

    def _take_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.wakeup, 4096)
            self.notice()

    def _has_finished(self, rank: int) -> bool:
        if self.finished.is_set():
            return True
        with contextlib.suppress(RuntimeError):  # the store died with the launcher
            return rank != LAUNCHER and self.store.check([f"finished/{rank}"])
        return False

    def _read_store(self) -> None:
        if self.store.check(["cause"]):
            self._end(json.loads(self.store.get("cause")))
        self.told_to_stop = self.told_to_stop or self.store.check(["stop"])
        self.store.add(f"beat/{self.rank}", 1)
        rank = self.neighbour.rank
        if rank == self.rank or self._has_finished(rank):
            return
        if news := self.neighbour.listen(self.store.add(f"beat/{rank}", 0), time.monotonic()):
            print(f"{self.labels[rank]} {news}", file=sys.stderr, flush=True)
        if self.neighbour.silent_s > self.deadline_s:
            what = f"has not answered for {self.deadline_s:g} s"
            cause = {"rank": rank, "what": what, "silent": True}
            self.store.compare_set("cause", "", json.dumps(cause))  # before it dies of the below
            for descriptor, peer in self.peers.items():
                if peer == rank:  # a paused process would not hear the launcher either
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            self._end(cause)

    def _end(self, cause: dict) -> None:
        """Says why, once, and ends the process at once; the main thread cannot be unwound."""
        self.ending.acquire()  # whoever comes second waits here for the end
        if self.finished.is_set():
            self.ending.release()
            return
        with contextlib.suppress(RuntimeError, ValueError):
            cause = json.loads(self.store.compare_set("cause", "", json.dumps(cause)))
        who = self.labels[cause["rank"]] if cause["rank"] != LAUNCHER else "the launcher"
        what = f"{who} {cause['what']}"
        line = f"{self.labels[self.rank]} stopped {self.doing()}: {what}"
        if cause["rank"] == self.rank:
            line = f"{what}, {self.doing()}"
        with contextlib.suppress(Exception):
            self.on_exit()
        with contextlib.suppress(FileError):
            write_text(self.logs / CAUSE_FILE, what)
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)
        os._exit(1)


def name_process(name: str) -> None:
    """For ps and top, which show its first 15 characters."""
    Path("/proc/self/comm").write_text(name)


def silent_rank(store: dist.Store) -> int | None:
    """The rank whose silence past the deadline ended a job; `store` as its Watch was given it."""
    store = dist.PrefixStore("watch", store)
    if not store.check(["cause"]):
        return None
    cause = json.loads(store.get("cause"))
    return cause["rank"] if cause.get("silent") else None


class Neighbour:
    """What is heard of a rank: a number that grows with its every heartbeat."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.beat, self.heard_s = -1, time.monotonic()
        self.silent_s = 0.0
        self.missed = False

    def listen(self, beat: int, now_s: float) -> str | None:
        """Takes what was heard at a time; gives what there is to say about it."""
        # while this process was paused itself, nobody was silent
        self.silent_s += min(now_s - self.heard_s, 5 * POLL_S)
        self.heard_s = now_s
        if beat != self.beat:
            news = f"answers again, after {self.silent_s:.0f} s" if self.missed else None
            self.beat, self.silent_s, self.missed = beat, 0.0, False
            return news
        if self.silent_s > SILENCE_S and not self.missed:
            self.missed = True
            return f"has not answered for {SILENCE_S:.0f} s"
        return None


def _machine() -> str:
    """Tells machines, and containers with their own process numbers, apart."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(FileNotFoundError):  # a kernel without such containers
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    return boot
