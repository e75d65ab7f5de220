"""Starts the ranks of this machine through torchrun's own launcher, and says how they ended."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from heteropp.description.files import FileError, make_folder
from heteropp.runtime.ranks.fork_server import fork_server
from heteropp.runtime.ranks.launchers import LOOPBACK
from heteropp.runtime.ranks.loopback import loopback_store
from heteropp.runtime.ranks.secret import draw_secret
from heteropp.runtime.ranks.watch import CAUSE_FILE

ELASTIC = "torch.distributed.elastic"
TALKATIVE = (
    *("torch.distributed", "torch.multiprocessing"),
    *(f"{ELASTIC}.agent.server.api", f"{ELASTIC}.multiprocessing.api"),
)
SHARED_MEMORY = Path("/dev/shm")
# as of torch 2.13 (5, and 2 a rank), twice: those of the start before may still be there
SEMAPHORES, SEMAPHORES_A_RANK = 10, 4
STORE_S = 60  # for an answer of the store
STOP_S = 600  # for the ranks to save when they are told to stop


def launch(
    entrypoint: Callable[..., int | None],
    *arguments: object,
    labels: tuple[str, ...],
    logs: Path,
    what: str = "training",
    restarts: int = 0,
) -> int:
    """Calls entrypoint(*arguments) in one process per label; gives the exit code.

    Rank 0 has the terminal; the others write to a folder of `logs`, and their errors here too.
    When a rank fails all of them are started again, at most `restarts` times. The exit code is
    what the entrypoint gives, 0 for None; 128 + the signal's number when told to stop. Raises
    FileError when the machine cannot start them.
    """
    check_shared_memory(len(labels))
    set_environment()
    draw_secret()
    make_folder(logs)
    (logs / CAUSE_FILE).unlink(missing_ok=True)
    fork_server(*(called for called in (entrypoint, *arguments) if callable(called)))
    others = range(1, len(labels))
    store = loopback_store()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=len(labels),
        run_id=uuid.uuid4().hex,
        rdzv_backend="static",
        rdzv_endpoint=f"{store.host}:{store.port}",
        rdzv_configs={"rank": 0, "timeout": STORE_S},
        local_addr=LOOPBACK,
        max_restarts=restarts,
        start_method="forkserver",
        log_line_prefix_template=" ",  # the lines name their rank themselves
        logs_specs=DefaultLogsSpecs(
            log_dir=str(logs),
            redirects=dict.fromkeys(others, Std.ALL),
            tee=dict.fromkeys(others, Std.ERR),
        ),
    )
    try:
        codes = elastic_launch(config, entrypoint)(*arguments)
    except ChildFailedError as error:
        print(f"{what} stopped: {_cause(error, labels, logs)}; logs are in {logs}", file=sys.stderr)
        return 1
    except SignalException as error:
        print(f"{what} stopped: {error.sigval.name} received", file=sys.stderr)
        return 128 + error.sigval
    return max(code or 0 for code in codes.values())


def check_shared_memory(ranks: int, folder: Path = SHARED_MEMORY) -> None:
    """Raises FileError where semaphores have no room, with which ranks are started."""
    try:
        status = os.statvfs(folder)
    except OSError as error:
        raise FileError(f"{folder} cannot be used: {error.strerror}") from None
    free_bytes = status.f_bavail * status.f_frsize
    needed_bytes = (SEMAPHORES + SEMAPHORES_A_RANK * ranks) * status.f_bsize  # a page for each
    if free_bytes < needed_bytes:
        raise FileError(
            f"{folder} has {free_bytes // 1024} KiB free, and {ranks} ranks need "
            f"{needed_bytes // 1024} KiB to start; enlarge it (mount -o remount,size=1g {folder}; "
            "docker run --shm-size 1g), or remove what is left in it"
        )


def set_environment() -> None:
    """Sets the ranks' environment, and silences the loggers of torch's launcher in this process."""
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # the ranks say what there is to say
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(STOP_S))  # torch 2.13
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
    # torch asks DNS for the name of whoever connects: a silent server shall cost 2 s, not 10
    os.environ.setdefault("RES_OPTIONS", "timeout:1")
    os.environ["OMP_NUM_THREADS"] = "1"  # many ranks share this machine's cores


def _cause(error: ChildFailedError, labels: tuple[str, ...], logs: Path) -> str:
    """Returns the cause that the ranks agreed on or, failing that, how the first of them ended."""
    try:
        return (logs / CAUSE_FILE).read_text()
    except OSError:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            return f"{labels[rank]} was killed by {signal.Signals(-failure.exitcode).name}"
        return f"{labels[rank]} ended with exit code {failure.exitcode}"
