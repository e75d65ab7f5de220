"""The bound that a process computes beside a search on many chips."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from clusters import tiny_model

from ditorch.chips import load_chip
from heteropp.cost.tracing import stage
from heteropp.description.cluster import Cluster, Node, in_order
from heteropp.search.auto.bound import BoundBeside, step_bound_s
from heteropp.search.auto.freedom import Freedom
from heteropp.search.judge import ask
from heteropp.search.planner import OPTIONS, Request
from hyperhetero.progress import Status


def request_on(nodes: int, vocab: int) -> Request:
    """vocab: its own for each test, so that no other has traced its stages."""
    some = [Node(name, load_chip(name), range(8)) for name in ("b", "c") for _ in range(nodes)]
    return Request(
        cluster=Cluster("many", in_order(some)),
        model=tiny_model(8, vocab=vocab),
        global_batch=2048,
        open=frozenset(OPTIONS),
        budget_s=1.0,
    )


def bound_s(request: Request) -> float:
    return step_bound_s(request, Freedom(request), request.cluster)


def test_a_search_on_many_chips_has_it_and_knows_what_the_process_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    request = request_on(65, vocab=72)
    before_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    result = ask("auto", request, 1).result
    assert result is not None
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime > before_s  # it has worked
    assert multiprocessing.active_children() == []
    monkeypatch.setattr(stage, "record_stage", None)  # nothing is left to be traced
    assert result.lower_bound_s == min(bound_s(request), result.best.cost_s)


@pytest.mark.parametrize("ends", ["killed", "not begun", "of other plans", "asked for"])
def test_it_is_the_same_whoever_computes_it(ends: str) -> None:
    request = request_on(1, vocab=80)
    freedom = Freedom(request)
    with BoundBeside(request) as bound:
        if ends != "not begun":
            bound.begin(Freedom(request, cuts_short=True) if ends == "of other plans" else freedom)
        children = multiprocessing.active_children()
        assert len(children) == (ends != "not begun")
        if ends == "killed":
            children[0].kill()
        assert bound.seconds(freedom) == bound_s(request)
    assert multiprocessing.active_children() == []


def test_there_is_no_process_beside_threads_that_may_hold_locks() -> None:
    request = request_on(1, vocab=80)
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    with BoundBeside(request) as bound, Status("searching"):  # whose thread holds none
        bound.begin(Freedom(request))
        assert multiprocessing.active_children() == []
        done.set()
        other.join()
        bound.begin(Freedom(request))
        assert len(multiprocessing.active_children()) == 1
        assert bound.seconds(Freedom(request)) == bound_s(request)


def test_in_a_daemon_there_is_no_process() -> None:
    request = request_on(1, vocab=80)
    context = multiprocessing.get_context("fork")
    answer, sender = context.Pipe(duplex=False)
    daemon = context.Process(target=_send_bound, args=(sender, request), daemon=True)
    daemon.start()
    assert answer.recv() == bound_s(request)
    daemon.join()  # other tests count the processes that there are


def _send_bound(sender: Connection, request: Request) -> None:
    with BoundBeside(request) as bound:
        bound.begin(Freedom(request))
        sender.send(bound.seconds(Freedom(request)))


@pytest.mark.parametrize("lacks", ["fork", "pipe"])
def test_without_room_for_a_process_the_search_goes_on(
    monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    def fails() -> None:
        raise BlockingIOError("no room")

    request = request_on(1, vocab=80)
    monkeypatch.setattr(os, lacks, fails)
    with BoundBeside(request) as bound:
        bound.begin(Freedom(request))
        assert bound.seconds(Freedom(request)) == bound_s(request)


KILLED = """
import os, signal, sys, time
from heteropp.search.auto.bound import BoundBeside, beside

beside.step_bound_s = lambda *_: time.sleep(60)
bound = BoundBeside(None)
bound.begin(None)
print("begun", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_process_ends_with_one_that_is_killed() -> None:
    """It has the same standard output, which is read to its end."""
    command = [sys.executable, "-c", KILLED]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGKILL, "begun\n", "")
