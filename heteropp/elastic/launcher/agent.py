"""Starts and reaps the members of one node, or of all nodes that one machine stands for."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from heteropp.description.files import FileError, make_folder
from heteropp.elastic.decisions.state import silence_s
from heteropp.elastic.job import Board, Generation, Job
from heteropp.elastic.lease import FOLLOW_S, Lease, LeaseTimer
from heteropp.elastic.messages import GRACE_S, KILLED_S, Ended, Failure, node_of
from heteropp.runtime.ranks.fork_server import fork_server
from heteropp.runtime.ranks.watch import name_process

Entrypoint = Callable[[Job, str, int], int]  # job, member, generation it is started for; exit code

LEASE_OVER = 75  # exit code of a member that ends just before its lease does


@dataclass
class Started:
    """A process of ours that has not been seen to end."""

    number: int  # of the generation that it was started for
    process: BaseProcess
    leases_over: int  # how many times the node's lease had run out before
    kill_at_s: float | None = None  # monotonic; None: it is to live
    killed: bool = False

    def kill(self) -> None:
        self.killed = True
        self.process.kill()


class Agent:
    def __init__(
        self,
        job: Job,
        nodes: Collection[str],
        board: Board,
        entrypoint: Entrypoint,
        is_leased: bool,
    ) -> None:
        """is_leased: members end where nobody renews their lease, as the job has other agents."""
        self.job, self.nodes, self.board, self.entrypoint = job, nodes, board, entrypoint
        self.started: dict[str, Started] = {}  # by member
        self.newest = 0
        self.context = fork_server(entrypoint)
        self.lease = Lease(self.context, silence_s(job.run.deadline_s)) if is_leased else None

    def turn(self) -> None:
        """Does what the leader says by now; does not wait."""
        self._reap()
        newest = self.board.heard(int, "newest") or 0
        self._end()
        if newest > self.newest:
            generation = self.board.hear(Generation, "generation", newest)
            if self._leaving().isdisjoint(generation.members):  # or else once they have ended
                self.newest = newest
                self._start(generation)

    def wait(self, timeout_s: float) -> None:
        """Waits until one of the members ends, at most `timeout_s`."""
        connection.wait([one.process.sentinel for one in self.started.values()], timeout_s)

    def close(self) -> None:
        """Kills whoever is left, and waits for their end."""
        for one in self.started.values():
            one.kill()
        for one in self.started.values():
            one.process.join(KILLED_S)

    def forget_memory(self, node: str) -> None:
        """Removes what a node kept in host memory: a real one that goes takes it along."""
        shutil.rmtree(self.job.memory_of(node), ignore_errors=True)

    def save_memory(self) -> None:
        """Copies what the nodes keep in host memory to their disks. Raises FileError."""
        for node in self.nodes:
            memory, disk = self.job.memory_of(node), self.job.disk_of(node)
            try:
                if memory.exists():
                    shutil.copytree(memory, disk, dirs_exist_ok=True)
            except OSError as error:  # shutil.Error is one, of several
                raise FileError(f"{memory} cannot be copied to {disk}: {error}") from None

    def clear_disk(self) -> None:
        """Removes what the nodes keep on their disks: the job is done, and its state saved."""
        for node in self.nodes:
            shutil.rmtree(self.job.disk_of(node), ignore_errors=True)
        with contextlib.suppress(OSError):  # of other nodes
            self.job.disk_of("").rmdir()

    def clear_memory(self) -> None:
        """Removes what the nodes keep in host memory, at the end of the job."""
        for node in self.nodes:
            self.forget_memory(node)
        with contextlib.suppress(OSError):  # other nodes of this machine are not done
            self.job.memory.rmdir()

    def _start(self, generation: Generation) -> None:
        """Starts its joiners on these nodes.

        Not whoever else is not there: the leader has yet to hear that its process ended.
        """
        for member in generation.joiners:
            if node_of(member) not in self.nodes or member in self.started:
                continue
            log = log_file(self.job.run.logs, generation.number, member)
            make_folder(log.parent)
            process = self.context.Process(
                target=_run,
                args=(self.entrypoint, self.job, member, generation.number, log, self.lease),
                name=f"heteropp-{member}",
            )
            process.start()
            self.started[member] = Started(generation.number, process, self._leases_over())

    def _end(self) -> None:
        """Kills members that were told to end and did not."""
        now_s = time.monotonic()
        for member, one in self.started.items():
            told = self.board.heard(str, "end", one.number, member) is not None
            if told and one.kill_at_s is None:
                one.kill_at_s = now_s + GRACE_S
            if one.kill_at_s is not None and now_s >= one.kill_at_s:
                one.kill()

    def _leaving(self) -> set[str]:
        """Returns the members that were told to end, and have not."""
        return {member for member, one in self.started.items() if one.kill_at_s is not None}

    def _reap(self) -> None:
        for member, one in list(self.started.items()):
            if (code := one.process.exitcode) is not None:
                del self.started[member]
                if failure := self._failure(one, code):
                    self.board.say(failure, "failed", one.number, member)
                ended = Ended(code=code, killed=one.killed)
                self.board.say(ended, "ended", one.number, member)

    def _leases_over(self) -> int:
        return self.lease.count_over() if self.lease else 0

    def _failure(self, one: Started, code: int) -> Failure | None:
        """Returns why a member ended that had a lease, and could not say so itself."""
        if self.lease is None or one.killed:
            return None
        if code == LEASE_OVER or (code and self._leases_over() > one.leases_over):
            lost_s = self.lease.word_s
            what = f"ended, as its node had not reached the job's store for {lost_s:.0f} s"
            return Failure(kind="other", what=what)
        if code == -signal.SIGKILL:  # the kernel's timer is not renewed by a member that is stopped
            what = f"was killed by SIGKILL, or stood still for {self.lease.length_s:.0f} s"
            return Failure(kind="chip", what=what)
        return None


def log_file(logs: Path, number: int, member: str) -> Path:
    """What a member that was started for a generation prints."""
    return logs / f"{number:04d}" / f"{member.replace('/', '-')}.log"


def _run(
    entrypoint: Entrypoint, job: Job, member: str, number: int, log: Path, lease: Lease | None
) -> None:
    """The member's process: its output goes to its log."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # a notice waits for the watch
    name_process(member)
    timer = LeaseTimer() if lease else None
    if lease and timer:
        timer.follow(lease)
    arguments = member, lease, timer
    threading.Thread(target=_end_with_agent, args=arguments, name="agent", daemon=True).start()
    os.setpgrp()  # what the terminal interrupts is the launcher alone
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    sys.exit(entrypoint(job, member, number))


def _end_with_agent(member: str, lease: Lease | None, timer: LeaseTimer | None) -> None:
    """Ends this process with its agent's, also while no watch does so yet, and with the lease."""
    agent = multiprocessing.parent_process()
    assert agent is not None
    while not connection.wait([agent.sentinel], FOLLOW_S if lease else None):
        assert lease is not None and timer is not None
        if lease.is_nearly_over():
            why = f"its node has not reached the job's store for {lease.word_s:.0f} s"
            print(f"{member} stopped: {why}", file=sys.stderr, flush=True)
            os._exit(LEASE_OVER)
        timer.follow(lease)
    time.sleep(GRACE_S)  # for the watch to say what this process was at
    os._exit(1)
