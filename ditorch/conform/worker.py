"""The process that runs conformance jobs, so that a crash or a hang takes only itself down.

It tells its parent, over a pipe, what it is about to do and what became of it; a parent that hears
nothing more knows where the process ended.
"""

from __future__ import annotations

import importlib
import os
import signal
import time
import warnings
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

from ditorch.conform.results import Settings

_GRACE_S = 30  # after a job's deadline; for processes whose parent is no longer there to end them


@dataclass(frozen=True)
class Job:
    """An operator of the database or a check of the runtime part."""

    part: str  # "operators" or "runtime"
    name: str


def work(
    pipe: Connection, settings: Settings, preload: list[str], log: str, job_s: float, threads: int
) -> None:
    """Runs jobs from the pipe until it is closed; the entry of a spawned process.

    threads: that the CPU's part may take.
    """
    _write_to(log)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    warnings.simplefilter("ignore")
    try:
        _set_up_torch(threads)
        for module in ("ditorch", *preload):
            importlib.import_module(module)
    except Exception as error:
        pipe.send(("cannot start", f"{type(error).__name__}: {error}"))
        return
    pipe.send(("ready", None))
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        signal.alarm(int(job_s + _GRACE_S))
        _run(job, settings, pipe)
        signal.alarm(0)


def _set_up_torch(threads: int) -> None:
    """Must come before the database is imported, which lets nobody change such settings then."""
    import torch

    torch.set_num_threads(threads)
    torch.backends.cudnn.allow_tf32 = False  # torch lets convolutions drop bits of float32


def _write_to(log: str) -> None:
    """Sends what C and Python print, such as a crash's last words, to a file."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)


def _run(job: Job, settings: Settings, pipe: Connection) -> None:
    if job.part == "runtime":
        pipe.send(("end", _run_check(job.name)))
    else:
        pipe.send(("end", _run_operator(job.name, settings, pipe)))


def _run_check(name: str) -> dict[str, Any]:
    from ditorch.conform import runtime
    from ditorch.conform.check import Unsupported

    check = next(check for check in runtime.CHECKS if f"{check.group}: {check.name}" == name)
    try:
        check.run()
    except Unsupported as error:
        return {"status": "unsupported", "reason": str(error)}
    except Exception as error:
        return {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    return {"status": "passed"}


def _run_operator(name: str, settings: Settings, pipe: Connection) -> dict[str, Any]:
    import ditorch
    from ditorch.conform.operators import check_operator

    def about_to(*place: Any) -> None:
        pipe.send(("about to", place))

    started = time.perf_counter()
    kernels, fallbacks = ditorch.kernel_counts(), ditorch.fallback_counts()
    for outcome in check_operator(name, settings, about_to):
        pipe.send(("outcome", outcome and asdict(outcome)))
    return {
        "kernels": _since(kernels, ditorch.kernel_counts()),
        "fallbacks": _since(fallbacks, ditorch.fallback_counts()),
        "elapsed_s": time.perf_counter() - started,
    }


def _since(before: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    runs = {name: count - before.get(name, 0) for name, count in now.items()}
    return {name: count for name, count in sorted(runs.items()) if count}
