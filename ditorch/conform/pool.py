"""Worker processes that outlive none of their jobs' crashes and hangs: see `worker`."""

from __future__ import annotations

import math
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from ditorch.conform.results import Settings
from ditorch.conform.worker import Job, work

_START_S = 120.0  # for a process to import torch, its test database and the device
_ENDING_S = 10.0  # for a process to end after its pipe is closed


@dataclass(frozen=True)
class ProcessReport:
    """One thing a job's process said, or what its parent saw."""

    kind: str  # "ready", "cannot start", "about to", "outcome", "end"; "lost" is the parent's
    content: Any


class _Worker:
    """One process at a time; a new one is started after the last has died."""

    def __init__(
        self, settings: Settings, preload: list[str], log: Path, job_s: float, threads: int
    ) -> None:
        self._arguments = (settings, preload, str(log), job_s, threads)
        self._job_s = job_s
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None

    def run(self, job: Job, hear: Callable[[ProcessReport], None]) -> None:
        """Returns after a report of kind "end" or "lost"."""
        pipe = self._pipe or self.start()
        end_s = time.monotonic() + self._job_s
        try:
            pipe.send(job)
            while pipe.poll(max(0.0, end_s - time.monotonic())):
                report = ProcessReport(*pipe.recv())
                hear(report)
                if report.kind == "end":
                    return
        except (EOFError, ConnectionError):
            hear(ProcessReport("lost", f"process died{self._cause_of_death()}"))
            return
        hear(ProcessReport("lost", f"did not end within {self._job_s:g} s"))
        self.stop(now=True)

    def stop(self, now: bool = False) -> None:
        if self._process is None or self._pipe is None:
            return
        self._pipe.close()
        if not now:
            self._process.join(_ENDING_S)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._process = self._pipe = None

    def start(self) -> Connection:
        """Raises ImportError if what the process imports cannot be imported."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, *self._arguments), daemon=True)
        self._process.start()
        theirs.close()
        try:
            if not self._pipe.poll(_START_S):
                raise ImportError(f"a worker process did not start within {_START_S:g} s")
            report = ProcessReport(*self._pipe.recv())
        except (EOFError, ConnectionError):
            raise ImportError(f"a worker process died{self._cause_of_death()} on start") from None
        if report.kind != "ready":
            raise ImportError(f"a worker process cannot start: {report.content}")
        return self._pipe

    def _cause_of_death(self) -> str:
        assert self._process is not None
        process = self._process
        process.join(_ENDING_S)
        code = process.exitcode
        self.stop(now=True)
        if code is None:
            return ""
        return f" with {signal.Signals(-code).name}" if code < 0 else f" with exit code {code}"


def run_jobs(
    jobs: Iterable[Job],
    hear: Callable[[Job, ProcessReport], None],
    *,
    workers: int,
    settings: Settings,
    preload: list[str],
    log: Path,
    job_s: float,
    within_s: float = math.inf,
) -> None:
    """Runs each job in one of `workers` processes; `hear` is called by one thread at a time.

    within_s: a process that has begun begins no job after so many seconds.

    A job's last report is "end", or "lost" if its process died or passed `job_s` seconds; the
    others go on. An exception in `hear` ends the run and is raised here.
    """
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    threads_each = max(1, (os.cpu_count() or 1) // workers)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def serve() -> None:
        worker = _Worker(settings, preload, log, job_s, threads_each)
        try:
            if math.isfinite(within_s):
                worker.start()
            last_s = time.monotonic() + within_s
            while not errors and time.monotonic() < last_s:
                try:
                    job = waiting.get_nowait()
                except queue.Empty:
                    break

                def tell(report: ProcessReport, job: Job = job) -> None:
                    with lock:
                        hear(job, report)

                worker.run(job, tell)
        except BaseException as error:
            errors.append(error)
        finally:
            worker.stop(now=bool(errors))

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt as interrupt:
        errors.append(interrupt)
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
