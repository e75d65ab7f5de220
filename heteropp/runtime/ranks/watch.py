"""Ends a rank when the job cannot go on, with one line that names the first cause.

A thread watches what the main thread, deep in a kernel or a wait, cannot: the deaths of the other
ranks of this machine and of the launcher, and a cause that any rank of the job wrote to the store.
The first cause to reach the store is the one that every rank names; none ends before the others
have heard it, as the launcher, and with it the store, may end next.

A process that is paused, or a machine that is gone, dies silently: nodes listen to each other's
heartbeats and to the store's answers, and ranks to their node's leader (heteropp.runtime.ranks.
node_posts), which alone asks the store as long as nothing happens. An error of communication is
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
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from heteropp.description.files import FileError, write_text
from heteropp.process_groups.control import Control
from heteropp.process_groups.seals import Seals, StorePart
from heteropp.runtime.ranks.first_cause import Cause, FirstCause
from heteropp.runtime.ranks.heartbeats import POLL_S, MonitoredPeer, RollCall
from heteropp.runtime.ranks.hung_launcher import end_if_hung
from heteropp.runtime.ranks.node_posts import News, NodeLeader, NodeRank, finish, has_finished
from heteropp.runtime.ranks.processes import Presence, Process
from heteropp.runtime.ranks.store import limit_answers
from heteropp.runtime.ranks.surroundings import meet, meet_nodes

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
        connection: dist.Store = store.clone()  # type: ignore[attr-defined]
        self.store = StorePart("watch", connection)
        self.store.set_timeout(timedelta(seconds=10))
        limit_answers(self.store, deadline_s)
        self.seals = Seals(self.store)
        self.first_cause = FirstCause(self.seals)
        self.notice = notice or (lambda: self.seals.set("stop", ""))
        self.error: str | None = None  # here
        self.roll_call: RollCall | None = None  # after an error that may be another's death
        self.error_is_own = False  # for certain
        self.tell_error: Callable[[], None] = lambda: None
        self.finished = threading.Event()
        self.told_to_stop = False  # some rank was
        self.failed = os.eventfd(0)  # readable when there is an error
        self.wakeup, self.wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self.wakeup_write, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)  # the thread below reads it from the pipe
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # which a member held back until now
        Watch.newest = self
        self.presence = Presence(control.rank)
        own = Process.own(store, self.presence)
        entries = Seals(StorePart(control.store.name, connection))
        self.surroundings = meet(control, own, labels, entries)
        self.post = self._post_after(-1)
        if isinstance(self.post, NodeLeader):
            self.post.beat()
        meet_nodes(control, self.surroundings)
        self.peers: dict[int, int] = {}  # file descriptor of the process: rank
        self.ended: set[int] = set()  # those of processes that ended well
        for rank, process in self.surroundings.local.items():
            if rank != self.rank:
                self._watch_process(process.number, rank)
        launcher = multiprocessing.parent_process()
        self._watch_process((launcher and launcher.pid) or os.getppid(), LAUNCHER)
        self.thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self.thread.start()

    def finish(self) -> None:
        """Ends the watch once this rank has done its part: no rank's end is then a failure here."""
        finish(self.seals, self.surroundings)
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
            self.presence.socket.close()  # who calls it now goes on to the next rank
            self.post.close()

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
            self._end({"rank": rank, "what": "died"})

    def _post_after(self, leader: int, beats: int = 0) -> NodeLeader | NodeRank:
        """Returns this rank's post under the next leader of its node, which may be itself."""
        for rank, process in self.surroundings.local.items():
            if leader < rank < self.rank and (connection := process.call()):
                return NodeRank(connection, rank, self.deadline_s, beats)
        return self._leader_post(beats)

    def _leader_post(self, beats: int) -> NodeLeader:
        socket = self.presence.socket
        return NodeLeader(
            self.seals, self.surroundings, socket, self.deadline_s, self._listen, beats
        )

    def _watch(self) -> None:
        turn_s = time.monotonic()
        while True:
            ready = self._wait(max(turn_s - time.monotonic(), 0))
            if self.finished.is_set():
                break
            asked_s = time.monotonic()
            try:
                for news in self.post.heard():  # first: whoever ended may have said why
                    self._take_news(news)
                for descriptor in ready & self.peers.keys():
                    self._take_end(descriptor)
                if isinstance(self.post, NodeRank) and self.post.channel.is_closed:
                    self._follow_next_leader()
                self._take_signals()
                if self.error is not None and not self.error_is_own:
                    self.post.ask()
                elif self.error is not None:
                    self._end_by_error(self.error)
                if asked_s >= turn_s:
                    turn_s = asked_s + POLL_S
                    self._take_news(self.post.turn())
            except RuntimeError:  # of the store
                self._lose_store(self._is_silent_since(asked_s))
        with contextlib.suppress(RuntimeError):  # the launcher may have ended
            self._take_signals()  # that came before another watch had them

    def _wait(self, limit_s: float) -> set[int]:
        """Returns the descriptors that something has happened to."""
        poll = select.poll()
        sockets = [socket.fileno() for socket in self.post.sockets()]
        failed = [self.failed] if self.error is None else []
        for descriptor in (*(self.peers.keys() - self.ended), *sockets, *failed, self.wakeup):
            poll.register(descriptor, select.POLLIN)
        return {descriptor for descriptor, _ in poll.poll(limit_s * 1000)}

    def _take_end(self, descriptor: int) -> None:
        rank = self.peers[descriptor]
        self.ended.add(descriptor)
        if not self._has_finished(rank):
            self._end({"rank": rank, "what": "died"})

    def _take_news(self, news: News) -> None:
        if news.store_is:
            self._lose_store(news.store_is == "silent")
        if news.cause:
            self._end(news.cause, is_first=True)
        self.told_to_stop = self.told_to_stop or news.stop
        if news.silent is not None:
            self._end_silent(news.silent)
        if news.beats and self.error is not None:
            self._call_roll(self.error, news.beats)

    def _follow_next_leader(self) -> None:
        assert isinstance(self.post, NodeRank)
        before = self.post
        before.close()
        self.post = self._post_after(before.leader, before.beats)

    def _listen(self, peer: MonitoredPeer, rank: int, beat: int, limit_s: float) -> bool:
        """Takes a rank's beat and says what there is to say; whether it is silent for too long."""
        if news := peer.listen(beat, time.monotonic()):
            print(f"{self.surroundings.name(rank)} {news}", file=sys.stderr, flush=True)
        return peer.silent_s > limit_s

    def _end_silent(self, rank: int) -> None:
        what = f"has not answered for {self.deadline_s:g} s"
        cause = self._whole({"rank": rank, "what": what, "silent": True})
        asked_s = time.monotonic()
        try:
            cause = self.first_cause.tell(cause)  # before it dies of the below
        except RuntimeError:  # the job may have ended elsewhere, and the store with it
            if self._is_silent_since(asked_s):  # it may be what the rank waits for, too
                raise
        for descriptor, peer in self.peers.items():
            if peer == rank:  # a paused process would not hear the launcher either
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        self._end(cause, is_first=True)

    def _is_silent_since(self, asked_s: float) -> bool:
        """Whether the store that has failed was silent, and not dead."""
        return time.monotonic() - asked_s > self.deadline_s / 2

    def _lose_store(self, is_silent: bool) -> None:
        is_torchruns = multiprocessing.parent_process() is None
        is_elsewhere = not self.surroundings.own.has_store
        with contextlib.suppress(RuntimeError):
            self.post.pass_on(News(store_is="silent" if is_silent else "dead"))
        if is_silent and is_torchruns and is_elsewhere and not self.finished.is_set():
            end_if_hung(os.getppid())
        silent = f"has not answered for {self.deadline_s:g} s"
        self._exit(self.surroundings.store_name(), silent if is_silent else "died")

    def _take_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.wakeup, 4096)
            self.notice()

    def _has_finished(self, rank: int) -> bool:
        if self.finished.is_set():
            return True
        with contextlib.suppress(RuntimeError):  # the store died with the launcher
            return rank != LAUNCHER and has_finished(self.seals, rank)
        return False

    def _call_roll(self, error: str, beats: list[int]) -> None:
        """Ends the process with an error here, or with the death of a rank that it shows."""
        self.roll_call = self.roll_call or RollCall(beats, self.deadline_s)
        missing = [r for r in self.roll_call.missing(beats) if not self._has_finished(r)]
        if missing and self.roll_call.is_over():
            self._end({"rank": missing[0], "what": "died or is cut off"})
        if not missing:
            self._end_by_error(error)

    def _end_by_error(self, error: str) -> None:
        with contextlib.suppress(Exception):
            self.tell_error()
        self._end({"rank": self.rank, "what": error})

    def _whole(self, cause: Cause) -> Cause:
        """Returns a cause with the names that ranks of other machines do not know."""
        rank = cause["rank"]
        who = self.surroundings.name(self.rank if rank == LAUNCHER else rank)
        return {**cause, "who": who, "seen_by": self.rank}

    def _end(self, cause: Cause, is_first: bool = False) -> None:
        """Names the job's first cause, which may be this one, and ends the process."""
        if self.finished.is_set():
            return
        is_told = is_first
        with contextlib.suppress(RuntimeError):  # there may be no store any more
            if not is_first:
                cause = self._whole(cause)
                cause = self.first_cause.tell(cause)
                is_told = True
            if isinstance(self.post, NodeRank) and self.post.leader == cause["rank"]:
                self.post = self._leader_post(self.post.beats)
            self.post.pass_on(News(cause=cause))
        rank = cause["rank"]
        who = cause.get("who") or self.surroundings.name(rank)
        if rank == LAUNCHER:
            is_here = cause["seen_by"] in self.surroundings.local
            who = "the launcher" if is_here else f"the launcher of {who}"
        self._exit(who, cause["what"], cause, is_told)

    def _exit(self, who: str, what: str, cause: Cause | None = None, is_told: bool = False) -> None:
        """Says why, and ends the process, as the main thread cannot be unwound.

        is_told: the others get a moment to hear the cause, too.
        """
        if self.finished.is_set():
            return
        line = f"{self.labels[self.rank]} stopped {self.doing()}: {who} {what}"
        if cause and cause["rank"] == self.rank:
            line = f"{self.labels[self.rank]} {what}, {self.doing()}"
        with contextlib.suppress(Exception):
            self.on_exit()
        with contextlib.suppress(FileError):
            write_text(self.logs / CAUSE_FILE, f"{who} {what}")
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)
        if is_told and cause:
            self.post.await_others(cause)
        os._exit(1)


def name_process(name: str) -> None:
    """Names this process for ps and top, which show the first 15 characters."""
    Path("/proc/self/comm").write_text(name)


def silent_rank(store: dist.Store) -> int | None:
    """Returns the rank whose silence past the deadline ended a job, or None if none's did.

    store: the one that the job's Watch was given.
    """
    cause = FirstCause(Seals(StorePart("watch", store))).heard()
    return cause["rank"] if cause and cause.get("silent") else None
