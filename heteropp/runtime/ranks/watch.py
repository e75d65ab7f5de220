"""Ends a rank when the job cannot go on, with one line that names the first cause.

A thread watches what the main thread, deep in a kernel or a wait, cannot: the deaths of the other
ranks of this machine and of the launcher, and a cause that any rank of the job wrote to the store.
The first cause to reach the store is the one that every rank names; none ends before the others
have heard it, as the launcher, and with it the store, may end next.

Each rank also listens for the heartbeat of the one before it, and for the store's answers: a
process that is paused, or a machine that is gone, dies silently. An error of communication is
mostly another rank's death: before it counts as an error of this rank, all others have to show by
heartbeats that they are alive.

A SIGTERM ends nothing by itself: `told_to_stop` is for the main thread, which finishes its step.
Where members outlive a plan it is a notice for the member's chip alone. A watch that is begun
before another one of this process has finished takes its signals over.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from heteropp.description.files import FileError, write_text
from heteropp.process_groups.control import Control
from heteropp.process_groups.seals import Seals, StorePart
from heteropp.runtime.ranks.first_cause import Cause, FirstCause
from heteropp.runtime.ranks.heartbeats import POLL_S, MonitoredPeer, RollCall
from heteropp.runtime.ranks.hung_launcher import end_if_hung
from heteropp.runtime.ranks.processes import Presence, Process, meet, names, store_name
from heteropp.runtime.ranks.store import limit_answers

TELL_S = 3 * POLL_S  # for the others to hear the cause
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
        a SIGTERM leads to, in the watch's thread; None: all ranks are told to stop. Raises
        FileError where a rank has another secret.
        """
        self.rank, self.labels, self.logs = control.rank, labels, logs
        self.deadline_s, self.doing, self.on_exit = deadline_s, doing, on_exit
        # a connection of its own: the main thread may hold the other in a wait
        self.store = StorePart("watch", store.clone())  # type: ignore[attr-defined]
        self.store.set_timeout(timedelta(seconds=10))
        limit_answers(self.store, deadline_s)
        self.seals = Seals(self.store)
        self.first_cause = FirstCause(self.seals)
        self.notice = notice or (lambda: self.seals.set("stop", ""))
        self.beats = 0  # of this rank
        self.error: str | None = None  # here
        self.roll_call: RollCall | None = None  # after an error that may be another's death
        self.error_is_own = False  # for certain
        self.tell_error: Callable[[], None] = lambda: None
        self.finished = threading.Event()
        self.told_to_stop = False  # some rank was
        self.before = (control.rank - 1) % control.world_size  # the rank that this one listens to
        self.neighbour = MonitoredPeer()
        self.failed = os.eventfd(0)  # readable when there is an error
        self.wakeup, self.wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self.wakeup_write, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)  # the thread below reads it from the pipe
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # which a member held back until now
        Watch.newest = self
        self.presence = Presence(control.rank)
        own = Process.own(store, self.presence)
        self.processes = meet(control, own, labels)
        self.names = names(labels, self.processes)
        self.store_name = store_name(labels, self.processes, self.rank)
        self.peers: dict[int, int] = {}  # file descriptor of the process: rank
        for rank, process in enumerate(self.processes):
            if rank != self.rank and process.shares_machine(own):
                self._watch_process(process.number, rank)
        launcher = multiprocessing.parent_process()
        self._watch_process((launcher and launcher.pid) or os.getppid(), LAUNCHER)
        self.thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self.thread.start()

    def finish(self) -> None:
        """Ends the watch once this rank has done its part: no rank's end is then a failure here."""
        self.seals.set(f"finished/{self.rank}", "")
        if Watch.newest is self:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)  # before it is closed
        self.finished.set()
        os.eventfd_write(self.failed, 1)  # wakes the thread
        # An interpreter that ends while a thread calls the store aborts the process.
        self.thread.join(self.deadline_s)
        if not self.thread.is_alive():
            for descriptor in (*self.peers, self.wakeup, self.wakeup_write, self.failed):
                os.close(descriptor)
            self.presence.socket.close()

    def fail(
        self, what: str, is_own: bool = False, tell: Callable[[], None] = lambda: None
    ) -> None:
        """Ends this process because of an error here; returns only where the watch had finished.

        is_own: the error is this rank's for certain, and not another rank's death seen from here.
        tell: is called if it is this rank's.
        """
        if self.finished.is_set():
            return
        self.error_is_own, self.tell_error, self.error = is_own, tell, what
        os.eventfd_write(self.failed, 1)
        self.finished.wait()  # the process ends in the watch's thread, which alone asks the store

    def _watch_process(self, process: int, rank: int) -> None:
        try:
            self.peers[os.pidfd_open(process)] = rank
        except ProcessLookupError:
            self._end({"rank": rank, "what": "died", "seen_by": self.rank})

    def _watch(self) -> None:
        poll = select.poll()
        for descriptor in (*self.peers, self.wakeup, self.failed):
            poll.register(descriptor, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(POLL_S * 1000)}
            if self.finished.is_set():
                break
            asked_s = time.monotonic()
            if self.failed in ready:
                poll.unregister(self.failed)
            for descriptor in ready & self.peers.keys():
                rank = self.peers[descriptor]
                poll.unregister(descriptor)
                if not self._has_finished(rank):
                    self._end({"rank": rank, "what": "died", "seen_by": self.rank})
            try:
                self._take_signals()
                self._read_store()
                if self.error is not None:
                    self._take_error(self.error)
            except RuntimeError:  # of the store
                self._lose_store(time.monotonic() - asked_s > self.deadline_s / 2)
        with contextlib.suppress(RuntimeError):  # the launcher may have ended
            self._take_signals()  # that came before another watch had them

    def _lose_store(self, is_silent: bool) -> None:
        is_torchruns = multiprocessing.parent_process() is None
        is_elsewhere = not self.processes[self.rank].has_store
        if is_silent and is_torchruns and is_elsewhere and not self.finished.is_set():
            end_if_hung(os.getppid())
        silent = f"has not answered for {self.deadline_s:g} s"
        self._exit(self.store_name, silent if is_silent else "died")

    def _take_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.wakeup, 4096)
            self.notice()

    def _has_finished(self, rank: int) -> bool:
        if self.finished.is_set():
            return True
        with contextlib.suppress(RuntimeError):  # the store died with the launcher
            return rank != LAUNCHER and self._has_said("finished", rank)
        return False

    def _read_store(self) -> None:
        if cause := self.first_cause.heard():
            self._end(cause)
        self.told_to_stop = self.told_to_stop or self.seals.get("stop") is not None
        self.beats += 1
        self.seals.set(f"beat/{self.rank}", str(self.beats))
        rank = self.before
        if rank == self.rank or self._has_finished(rank):
            return
        if news := self.neighbour.listen(self._beat(rank), time.monotonic()):
            print(f"{self.names[rank]} {news}", file=sys.stderr, flush=True)
        if self.neighbour.silent_s > self.deadline_s:
            what = f"has not answered for {self.deadline_s:g} s"
            cause = {"rank": rank, "what": what, "silent": True}
            self.first_cause.tell(cause)  # before it dies of the below
            for descriptor, peer in self.peers.items():
                if peer == rank:  # a paused process would not hear the launcher either
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            self._end(cause)

    def _take_error(self, error: str) -> None:
        """Ends the process with an error here, or with the death of a rank that it shows."""
        if not self.error_is_own:
            beats = [self._beat(rank) for rank in range(len(self.labels))]
            self.roll_call = self.roll_call or RollCall(beats, self.deadline_s)
            missing = [r for r in self.roll_call.missing(beats) if not self._has_finished(r)]
            if missing and not self.roll_call.is_over():
                return
            if missing:
                self._end({"rank": missing[0], "what": "died or is cut off"})
        with contextlib.suppress(Exception):
            self.tell_error()
        self._end({"rank": self.rank, "what": error})

    def _end(self, cause: Cause) -> None:
        """Names the job's first cause, which may be this one, and ends the process."""
        if self.finished.is_set():
            return
        told = False
        with contextlib.suppress(RuntimeError):  # there may be no store any more
            cause = self.first_cause.tell(cause)
            self.seals.set(f"told/{self.rank}", "")
            told = True
        rank = cause["rank"]
        who = self._launcher_name(cause["seen_by"]) if rank == LAUNCHER else self.names[rank]
        others = set(range(len(self.labels))) - {rank, self.rank}
        self._exit(who, cause["what"], rank == self.rank, others if told else set())

    def _launcher_name(self, rank: int) -> str:
        """Names the launcher that started `rank`, by its machine if that is another one."""
        here = self.processes[rank].machine == self.processes[self.rank].machine
        return "the launcher" if here else f"the launcher of {self.names[rank]}"

    def _exit(
        self, who: str, what: str, is_own: bool = False, others: Collection[int] = ()
    ) -> None:
        """Says why, and ends the process, as the main thread cannot be unwound.

        others: ranks that get a moment to hear the cause, too.
        """
        if self.finished.is_set():
            return
        line = f"{self.labels[self.rank]} stopped {self.doing()}: {who} {what}"
        if is_own:
            line = f"{self.labels[self.rank]} {what}, {self.doing()}"
        with contextlib.suppress(Exception):
            self.on_exit()
        with contextlib.suppress(FileError):
            write_text(self.logs / CAUSE_FILE, f"{who} {what}")
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)
        until_s = time.monotonic() + TELL_S
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < until_s and not all(map(self._knows, others)):
                time.sleep(0.05)
        os._exit(1)

    def _knows(self, rank: int) -> bool:
        return self._has_said("told", rank) or self._has_said("finished", rank)

    def _has_said(self, word: str, rank: int) -> bool:
        return self.seals.get(f"{word}/{rank}") is not None

    def _beat(self, rank: int) -> int:
        return int(self.seals.get(f"beat/{rank}") or 0)


def name_process(name: str) -> None:
    """Names this process for ps and top, which show the first 15 characters."""
    Path("/proc/self/comm").write_text(name)


def silent_rank(store: dist.Store) -> int | None:
    """Returns the rank whose silence past the deadline ended a job, or None if none's did.

    store: the one that the job's Watch was given.
    """
    cause = FirstCause(Seals(StorePart("watch", store))).heard()
    return cause["rank"] if cause and cause.get("silent") else None
