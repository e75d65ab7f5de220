"""The lease of a node's members: what becomes of a process that nobody renews it for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest
import torch.distributed as dist

from heteropp.elastic import lease as leases
from heteropp.elastic.job import Board
from heteropp.elastic.launcher.pulse import Heart
from heteropp.elastic.lease import Lease, LeaseTimer, clock_s

LONG_S = 600.0


def process_with(lease: Lease) -> int:
    """Starts a process that ends with the lease, and lives on for long without it."""
    ready, tell = os.pipe()
    process = os.fork()
    if not process:
        timer = LeaseTimer()
        timer.follow(lease)
        os.write(tell, b".")
        begin_s = time.monotonic()
        while time.monotonic() < begin_s + LONG_S:
            time.sleep(0.01)
            timer.follow(lease)
        os._exit(0)
    os.read(ready, 1)
    os.close(ready)
    os.close(tell)
    return process


def end_of(process: int) -> int:
    """Waits for the end of a process, and returns the signal that ended it."""
    return os.WTERMSIG(os.waitpid(process, 0)[1])


def test_a_stopped_process_ends_with_its_lease_and_never_goes_on() -> None:
    lease = Lease(multiprocessing.get_context("forkserver"), 1)
    process = process_with(lease)
    os.kill(process, signal.SIGSTOP)
    assert end_of(process) == signal.SIGKILL
    assert lease.left_s() < 0 and lease.count_over() == 1


def test_a_process_lives_on_while_its_lease_is_renewed() -> None:
    lease = Lease(multiprocessing.get_context("forkserver"), LONG_S)
    process = process_with(lease)
    first_s = lease.left_s()
    lease.renew(clock_s() + LONG_S)
    assert lease.left_s() > first_s and lease.count_over() == 0
    assert os.waitpid(process, os.WNOHANG) == (0, 0)
    lease.renew(clock_s() - LONG_S)  # of a beat that the store took too late
    assert end_of(process) == signal.SIGKILL


class SilentBoard(Board):
    """Takes one beat, and answers no other."""

    def say(self, value: object, *key: object) -> None:
        if value != 1:
            time.sleep(LONG_S)


def test_a_leader_that_does_not_reach_the_store_says_so_before_its_lease_ends_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(leases, "WORD_S", 30.0)
    process = os.fork()
    if not process:
        lease = Lease(multiprocessing.get_context("forkserver"), 35)
        Heart(SilentBoard(dist.HashStore()), "a", lease, LeaseTimer())
        time.sleep(LONG_S)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 1
    assert capfd.readouterr().err == "node a stopped: it has not reached the job's store for 2 s\n"
