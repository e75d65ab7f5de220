"""Ranks that heteropp-train starts, and that train a plan: what each costs."""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from trained import TrainingError

from scale import Failed
from scale.counted_store import Request, count_for_store
from scale.growth import (
    CPU,
    MOST_REQUESTS,
    REPEATED_LOOKS,
    REQUESTS,
    STEP_REQUESTS,
    WATCH_REQUESTS,
)
from scale.processes import (
    cpu_s_of,
    descendants,
    descriptors_of,
    memory_mib_of,
    pipes_of,
    threads_of,
)
from scale.sizes import MACHINE_RANKS
from scale.tiny_training import start, wait_for_steps

COUNTED_STEPS, COUNTED_S = 5, 3.0  # whose requests are counted: no fewer steps, and no shorter
ANSWER_S = 60.0
LOOKS = frozenset({"compare_set", "check", "get", "wait"})  # for what another has to write


def measure(ranks: int) -> dict[str, float]:
    """Trains with so many ranks; returns what one of them has, by the names of KINDS.

    Of requests and CPU time that is the mean of all, else the most that any has. A look that finds
    nothing yet and is repeated counts once in the requests of the start: how often depends on how
    unevenly ranks start. "start-up" are the seconds from the command to the end of the first step.
    Raises Failed.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _measure(Path(folder), ranks)
    except TrainingError as error:
        raise Failed(f"{ranks} ranks that train: {error}") from None
    except OSError as error:
        raise Failed(f"{ranks} ranks that train: one has ended: {error}") from None


def _measure(folder: Path, ranks: int) -> dict[str, float]:
    port_file = folder / "port"
    with _relay(ranks, port_file) as relay:
        begun_s = time.monotonic()
        training = start(folder, ranks, port_file, relay.ports)
        try:
            wait_for_steps(training, 1)
            start_s = time.monotonic() - begun_s
            asked = relay.asked().training
            starting = list(first_asks(asked))
            processes = descendants(training.process.pid, "heteropp-")
            if len(processes) != ranks:
                raise Failed(f"{len(processes)} of {ranks} ranks that train were found")
            cpu_s = statistics.mean(map(cpu_s_of, processes))
            before = wait_for_steps(training, 2)
            relay.asked()
            begun_s, counted_s, steps = time.monotonic(), 0.0, 0
            while steps < COUNTED_STEPS or counted_s < COUNTED_S:
                steps = wait_for_steps(training, before + steps + 1) - before
                counted_s = time.monotonic() - begun_s
            stepping = relay.asked()
            # torch's launcher leaves two in each rank for every rank that it started
            launchers = 2 * max(ranks - MACHINE_RANKS, 0)
            return {
                "start-up": start_s,
                REQUESTS: len(starting) / ranks,
                MOST_REQUESTS: max(Counter(request.door for request in starting).values()),
                REPEATED_LOOKS: (len(asked) - len(starting)) / ranks,
                STEP_REQUESTS: len(stepping.training) / ranks / steps,
                WATCH_REQUESTS: len(stepping.watch) / ranks / counted_s,
                "threads": max(map(threads_of, processes)),
                "descriptors": max(
                    descriptors_of(each) - min(launchers, pipes_of(each)) for each in processes
                ),
                "memory": max(memory_mib_of(each, MACHINE_RANKS) for each in processes),
                CPU: cpu_s,
            }
        finally:
            training.stop()


def first_asks(requests: Iterable[Request]) -> Iterator[Request]:
    """Leaves out looks that a client repeats."""
    seen = set()
    for request in requests:
        look = (request.client, request.query, request.keys)
        if request.query not in LOOKS or look not in seen:
            seen.add(look)
            yield request


class _Asked(NamedTuple):
    training: list[Request]
    watch: list[Request]  # which asks as long as the ranks live, whatever they do


class _Relay:
    """The process between ranks and their store."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        self.ports: list[int] = self._answer()

    def asked(self) -> _Asked:
        """Returns what was asked since the last time."""
        self.pipe.send("")
        requests = self._answer()
        found = _Asked([], [])
        for request in requests:
            is_watch = any("/watch/" in key for key in request.keys)
            (found.watch if is_watch else found.training).append(request)
        return found

    def _answer(self) -> Any:
        if not self.pipe.poll(ANSWER_S):
            raise Failed(f"what counts the store's requests has not answered for {ANSWER_S:g} s")
        return self.pipe.recv()


@contextmanager
def _relay(ranks: int, port_file: Path) -> Iterator[_Relay]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=count_for_store, args=(ranks, port_file, theirs), daemon=True)
    process.start()
    try:
        yield _Relay(ours)
    finally:
        process.kill()
        process.join()
