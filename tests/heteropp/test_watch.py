"""Watches of one process that follow on each other, and those of a job: what they end with."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import forkserver
import pytest
import torch.distributed as dist
from sampled import sampled
from scale.counted_store import Request, keep_counted_store

from heteropp.process_groups.control import Control
from heteropp.runtime.ranks import processes
from heteropp.runtime.ranks.heartbeats import POLL_S, SILENCE_S
from heteropp.runtime.ranks.processes import Presence, Process
from heteropp.runtime.ranks.watch import Watch


def told(logs: Path, number: int, store: dist.Store, heard: Callable[[], None]) -> Watch:
    """Makes a watch in a world of one rank."""
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


def finish(logs: Path) -> None:
    """An interpreter that ended while the watch's thread calls the store would abort."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    watch = told(logs, 0, store, lambda: None)
    assert "watch" in {thread.name for thread in threading.enumerate()}
    watch.finish()
    os._exit("watch" in {thread.name for thread in threading.enumerate()})


def test_a_watch_that_has_finished_calls_the_store_no_more(tmp_path: Path) -> None:
    process = forkserver.context().Process(target=finish, args=(tmp_path,))
    process.start()
    process.join(120)
    assert process.exitcode == 0


def test_a_process_of_a_clone_is_not_taken_for_one_of_this_machine() -> None:
    """The clone of a virtual machine has its name, and process numbers of its own."""
    presence = Presence(0)
    own = Process("machine", "host", os.getpid(), False, presence.name)
    assert own.shares_machine(own)
    assert not own._replace(machine="another").shares_machine(own)
    assert not own._replace(number=os.getppid()).shares_machine(own)
    assert not own._replace(presence=f"{presence.name}0").shares_machine(own)
    presence.socket.close()
    assert not own.shares_machine(own)


class Rank:
    """A process with a watch, on whatever machine it is told to be."""

    def __init__(self, logs: Path, rank: int, *job: Any) -> None:
        """job: machines, port and deadline, as `watched` takes them."""
        arguments = (logs / f"rank-{rank}", rank, *job)
        self.logs = arguments[0]
        self.pipe, theirs = forkserver.context().Pipe()
        self.process = forkserver.context().Process(target=watched, args=(*arguments, theirs))
        self.process.start()
        theirs.close()

    def cause(self) -> str:
        """Waits until the process has ended and returns the cause that it wrote."""
        self.process.join(60)
        assert self.process.exitcode == 1
        return (self.logs / "cause").read_text()

    def said(self) -> str:
        return (self.logs / "stderr").read_text()


DEADLINE_S = 3.0


def watched(
    logs: Path,
    rank: int,
    machines: Sequence[int],
    port: int,
    deadline_s: float,
    pipe: Connection,
) -> None:
    processes._machine = lambda: f"machine-{machines[rank]}"
    world_size = len(machines)
    logs.mkdir(parents=True)
    sys.stderr = (logs / "stderr").open("w")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    control = Control(store, rank, world_size, 60)
    labels = [f"rank {number}" for number in range(world_size)]
    watch = Watch(store, control, labels, logs, deadline_s, lambda: "", lambda: None)
    pipe.send("watched")
    while what := pipe.recv():
        if what == "finish":
            watch.finish()
            pipe.send("finished")
        else:
            watch.fail(*what)
    pipe.send(watch.told_to_stop)
    pipe.recv()


def keep_store(pipe: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send([store.port])
    pipe.recv()


class Job:
    def __init__(
        self,
        logs: Path,
        machines: Sequence[int],
        keep_store: Callable[[Connection], None] = keep_store,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """machines: of the ranks."""
        self.pipe, theirs = forkserver.context().Pipe()
        self.store = forkserver.context().Process(target=keep_store, args=(theirs,))
        self.store.start()
        [self.port] = self.pipe.recv()
        self.ranks = [
            Rank(logs, rank, machines, self.port, deadline_s) for rank in range(len(machines))
        ]
        for rank in self.ranks:
            assert rank.pipe.poll(60)
            assert rank.pipe.recv() == "watched"

    def asked(self) -> list[Request]:
        """Returns what was asked of a counted store since the last time."""
        self.pipe.send("")
        return self.pipe.recv()

    def end(self) -> None:
        for process in (self.store, *(rank.process for rank in self.ranks)):
            process.kill()
            process.join(30)


@contextmanager
def running(*arguments: Any) -> Iterator[Job]:
    job = Job(*arguments)
    try:
        yield job
    finally:
        job.end()


@pytest.fixture(
    params=[(0, 1, 2), pytest.param((0, 0, 1), marks=pytest.mark.long)],
    ids=["three machines", "two machines"],
)
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    with running(tmp_path, request.param) as job:
        yield job


def test_a_silent_store_ends_the_ranks(job: Job) -> None:
    assert job.store.pid
    os.kill(job.store.pid, signal.SIGSTOP)
    for rank in job.ranks:
        assert rank.cause() == "the launcher has not answered for 3 s"


def test_no_rank_says_that_a_leader_is_silent_which_waits_for_the_store(tmp_path: Path) -> None:
    with running(tmp_path, (0, 0), keep_store, SILENCE_S + 3) as job:
        assert job.store.pid
        os.kill(job.store.pid, signal.SIGSTOP)
        for rank in job.ranks:
            assert rank.cause() == "the launcher has not answered for 13 s"
            assert "rank 0 has not answered" not in rank.said()


def test_the_rank_that_died_is_named_and_not_the_one_that_noticed(job: Job) -> None:
    first, dead, last = job.ranks
    dead.process.kill()
    last.pipe.send(("failed: rank 1 has hung up",))
    for rank in (first, last):
        who = f"rank 1 on {socket.gethostname()}"
        assert rank.cause().removeprefix(f"{who} ") in (
            "died",  # was seen by its own machine
            "died or is cut off",
            "has not answered for 3 s",
        )


def test_an_error_of_a_rank_is_told_before_its_launcher_ends(job: Job) -> None:
    """Whose end is that of the store."""
    full = "stopped: /checkpoints/step-5 cannot be written: No space left on device"
    job.ranks[1].pipe.send((full, True))
    job.ranks[1].process.join(60)
    job.store.kill()
    for rank in job.ranks:
        assert rank.cause() == f"rank 1 on {socket.gethostname()} {full}"


def test_an_error_that_nobody_died_of_is_the_rank_s_own(job: Job) -> None:
    job.ranks[1].pipe.send(("failed: ValueError",))
    for rank in job.ranks:
        assert rank.cause() == f"rank 1 on {socket.gethostname()} failed: ValueError"


@pytest.mark.parametrize("job", [(0, 0, 1)], indirect=True, ids=["two machines"])
@pytest.mark.parametrize(
    "words",
    [
        '{"rank": 0, "what": "was told to go home"}',
        '["{\\"rank\\": 0, \\"what\\": \\"was told to go home\\"}", "00"]',
        "no JSON",
        "[1, 2]",
    ],
)
def test_a_stranger_ends_nothing_and_hides_nothing(job: Job, words: str) -> None:
    stranger = dist.TCPStore("127.0.0.1", job.port, is_master=False)
    for key in ("cause", "stop", "finished/0", "finished/1", "finished/2", "told/0"):
        dist.PrefixStore("watch", stranger).set(key, words)
    time.sleep(3 * POLL_S)
    assert all(rank.process.is_alive() for rank in job.ranks)
    job.ranks[0].pipe.send(())
    assert job.ranks[0].pipe.recv() is False  # it was not told to stop
    job.ranks[1].pipe.send(("failed: ValueError",))
    for rank in job.ranks:
        assert rank.cause() == f"rank 1 on {socket.gethostname()} failed: ValueError"


@pytest.mark.parametrize("job", [(0, 0, 1)], indirect=True, ids=["two machines"])
def test_a_stranger_who_calls_a_rank_is_not_heard(job: Job) -> None:
    """Any process of the machine finds the local sockets of the ranks, and may speak there."""
    words = b'{"beat": 9, "asks": false, "cause": {"rank": 0, "what": "was told to go home"}}'
    for rank, word in itertools.product(job.ranks, (b"hello", b"\xff", b"[1]", b"", words)):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            assert rank.process.pid
            os.kill(rank.process.pid, signal.SIGSTOP)  # it finds the call and the word together
            time.sleep(POLL_S / 20)
            stranger.connect(presence_of(rank.process.pid))
            with suppress(BrokenPipeError):  # it may have hung up before it stopped
                stranger.send(word)
            os.kill(rank.process.pid, signal.SIGCONT)
            time.sleep(POLL_S / 10)
    job.ranks[1].pipe.send(("failed: ValueError", True))
    for rank in job.ranks:
        assert rank.cause() == f"rank 1 on {socket.gethostname()} failed: ValueError"


def presence_of(process: int) -> str:
    """Returns the address of a process's Presence, as any process of the machine finds it."""
    names = (line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines())
    found = re.compile(rf"@heteropp-\d+-{process}-\w+")
    return next(name for name in names if found.fullmatch(name)).replace("@", "\0")


@pytest.mark.parametrize("job", [(0, 1, 2)], indirect=True, ids=["three machines"])
def test_a_stranger_keeps_no_silent_rank_alive(job: Job) -> None:
    stranger = dist.TCPStore("127.0.0.1", job.port, is_master=False)
    watch = dist.PrefixStore("watch", stranger)
    time.sleep(2 * POLL_S)
    heard = watch.get("beat/1")
    assert job.ranks[1].process.pid
    os.kill(job.ranks[1].process.pid, signal.SIGSTOP)
    ended = threading.Event()

    def beat() -> None:
        """Writes a counter that grows, and what a rank of the job has written."""
        for number in itertools.count(100):
            for text in (str(number), heard):
                watch.set("beat/1", text)
                if ended.wait(POLL_S / 3):
                    return

    threading.Thread(target=beat, daemon=True).start()
    for rank in (job.ranks[0], job.ranks[2]):
        assert rank.cause() == f"rank 1 on {socket.gethostname()} has not answered for 3 s"
    ended.set()


HOST = socket.gethostname()


@pytest.mark.parametrize("silent", sampled([0, 2, 1], 1, everyday=1))
def test_a_silent_rank_is_named_by_all(tmp_path: Path, silent: int) -> None:
    """The leader of a node with others, one of these, and one alone on its machine.

    The store may end with the first rank of another machine, where the launcher may be.
    """
    machines = (0, 0, 1)
    with running(tmp_path, machines) as job:
        victim = job.ranks[silent]
        assert victim.process.pid
        os.kill(victim.process.pid, signal.SIGSTOP)
        elsewhere = next(rank for rank in range(3) if machines[rank] != machines[silent])
        job.ranks[elsewhere].process.join(60)
        job.store.kill()
        for rank in job.ranks:
            if rank is not victim:
                assert rank.cause() == f"rank {silent} on {HOST} has not answered for 3 s"
        victim.process.kill()


@pytest.mark.parametrize("dead", sampled([1, 0], 1, everyday=1))
def test_a_dead_rank_is_named_by_all(tmp_path: Path, dead: int) -> None:
    with running(tmp_path, (0, 0, 1)) as job:
        job.ranks.pop(dead).process.kill()
        for rank in job.ranks:
            assert rank.cause() == f"rank {dead} on {HOST} died"


def test_a_node_goes_on_when_its_leader_has_finished(tmp_path: Path) -> None:
    with running(tmp_path, (0, 0, 0, 1)) as job:
        first, second, third, other = job.ranks
        for rank in (first, second):
            rank.pipe.send("finish")
            assert rank.pipe.recv() == "finished"
        first.process.kill()
        time.sleep(DEADLINE_S + 2 * POLL_S)
        assert third.process.is_alive() and other.process.is_alive()
        assert third.process.pid
        os.kill(third.process.pid, signal.SIGSTOP)
        assert other.cause() == f"rank 2 on {HOST} has not answered for 3 s"
        third.process.kill()


def finish_first(job: Job) -> None:
    """Makes the leader of the first node finish."""
    job.ranks[0].pipe.send("finish")
    assert job.ranks[0].pipe.recv() == "finished"


@pytest.mark.parametrize(
    ("machines", "silent"), sampled([((0, 0, 1), 1), ((0, 0, 0, 1), 2)], 1, everyday=1)
)
def test_a_rank_that_is_paused_when_its_leader_finishes_is_named(
    tmp_path: Path, machines: Sequence[int], silent: int
) -> None:
    """The one that has to be the next leader, and one that has to call it."""
    with running(tmp_path, machines) as job:
        victim = job.ranks[silent]
        assert victim.process.pid
        time.sleep(3 * POLL_S)  # the leader's beats tell of it by now
        os.kill(victim.process.pid, signal.SIGSTOP)
        finish_first(job)
        for rank in job.ranks[1:]:
            if rank is not victim:
                assert rank.cause() == f"rank {silent} on {HOST} has not answered for 3 s"
        victim.process.kill()


def test_a_node_is_waited_for_until_all_of_its_ranks_have_finished(tmp_path: Path) -> None:
    with running(tmp_path, (0, 0, 1)) as job:
        finish_first(job)
        time.sleep(2 * POLL_S)  # the other rank is its node's leader by now
        job.ranks[2].pipe.send(("failed: ValueError", True))
        job.ranks[2].process.join(60)
        job.store.kill()
        for rank in job.ranks[1:]:
            assert rank.cause() == f"rank 2 on {HOST} failed: ValueError"


@pytest.mark.parametrize(
    "sizes", [(4, 16), pytest.param((4, 8, 16, 32), marks=pytest.mark.long)], ids=["16", "32"]
)
def test_what_is_asked_of_the_store_grows_with_the_machines_and_not_the_ranks(
    tmp_path: Path, sizes: Sequence[int]
) -> None:
    """Each rank asks for as much in every job at its start; from then on the leaders alone ask."""
    local = 4
    most, others, keys = {}, {}, {}  # requests of rank 0, and of others; keys of all requests
    for size in sizes:
        machines = [rank // local for rank in range(size)]
        with running(tmp_path / str(size), machines, keep_counted_store) as job:
            meeting = [asked for asked in job.asked() if asked.is_about("/control/")]
            of_client = Counter(request.client for request in meeting)
            *others[size], most[size] = sorted(of_client.values())
            keys[size] = sum(len(request.keys) for request in meeting)
            assert len(of_client) == size
            watching: list[Request] = []
            while (beats := sum(map(is_beat, watching))) < 4 * size // local:
                time.sleep(POLL_S / 4)
                watching += job.asked()
            assert len({request.client for request in watching}) == size // local
            assert len(watching) <= 6 * beats
    assert len(set(most.values())) == 1
    assert len({requests for found in others.values() for requests in found}) == 1
    assert all(keys[size] / size <= 1.05 * keys[4] / 4 for size in sizes)


def is_beat(request: Request) -> bool:
    return request.query == "set" and request.is_about("/watch/beat/")
