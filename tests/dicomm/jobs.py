"""Runs the ranks of a point-to-point test as real processes."""

from __future__ import annotations

import hashlib
import hmac
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import forkserver

import dicomm

DEADLINE_S = 60
SECRET = "a secret of this test"


def connect(folder: str, rank: int, world_size: int, **options: Any) -> dicomm.Communicator:
    options = {"secret": SECRET, "timeout_s": 20.0} | options
    return dicomm.Communicator(rank, world_size, dicomm.FileStore(folder), **options)


def contact(folder: Path, rank: int) -> list[str]:
    """Returns the words by which a rank says how it is reached, without their seal."""
    return dicomm.FileStore(folder).get(f"dicomm/default/{rank}", 10).decode().split()[:-1]


def publish(folder: Path, rank: int, words: list[str]) -> None:
    """Writes such words with the seal that shows that their writer knows the secret."""
    key, value = f"dicomm/default/{rank}", " ".join(words)
    seal = hmac.new(SECRET.encode(), f"store\n{key}\n{value}".encode(), hashlib.sha256).hexdigest()
    dicomm.FileStore(folder).set(key, f"{value} {seal}".encode())


def _body(function: Callable[..., Any], rank: int, folder: str, pipe: Connection, args: Any):
    try:
        pipe.send(("returned", function(rank, folder, *args)))
    except BaseException:
        pipe.send(("raised", traceback.format_exc()))


class Job:
    """function(rank, folder, *args) in one process a rank; leaving the block kills what is left."""

    def __init__(self, world_size: int, function: Callable[..., Any], folder: Path, *args: Any):
        context = forkserver.context()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_body, args=(function, rank, str(folder), theirs, args), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def result(self, rank: int) -> Any:
        if not self.pipes[rank].poll(DEADLINE_S):
            raise AssertionError(f"rank {rank} did nothing for {DEADLINE_S} s")
        how, value = self.pipes[rank].recv()
        assert how == "returned", f"rank {rank}:\n{value}"
        return value

    def kill(self, rank: int) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        self.processes[rank].join()


def run(world_size: int, function: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    with Job(world_size, function, folder, *args) as job:
        return [job.result(rank) for rank in range(world_size)]


def wait_for_file(path: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never appeared"
        time.sleep(0.002)
