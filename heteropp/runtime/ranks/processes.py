"""Where the ranks of a job run, and what they and their machines are called."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from heteropp.description.files import FileError
from heteropp.process_groups.control import Control
from heteropp.process_groups.seals import UntrueError
from heteropp.runtime.ranks.secret import unlike_secrets
from heteropp.runtime.ranks.store import is_here


class Process(NamedTuple):
    """Where the process of a rank runs."""

    machine: str  # tells machines, and containers with their own process numbers, apart
    host: str
    number: int  # on its machine
    has_store: bool  # whether the job's store is on its machine

    @staticmethod
    def own(store: dist.Store) -> Process:
        return Process(_machine(), socket.gethostname(), os.getpid(), is_here(store))


def meet(control: Control, own: Process, labels: Sequence[str]) -> list[Process]:
    """Returns all ranks' processes, by rank. Raises FileError where one has another secret."""
    control.publish("process", json.dumps(own))
    try:
        return [Process(*json.loads(text)) for text in control.collect("process")]
    except UntrueError as error:
        called = list(labels)
        with contextlib.suppress(ValueError, TypeError):  # a stranger wrote what no rank says
            there = [Process(*json.loads(found.text)) for found in error.found]
            called = names(labels, there)
        unlike = unlike_secrets(called, [found.is_true for found in error.found])
        raise FileError(unlike or str(error)) from None


def names(labels: Sequence[str], processes: Sequence[Process]) -> list[str]:
    """Returns the ranks' names, in order, with their machines where there are several."""
    if len({process.machine for process in processes}) == 1:
        return list(labels)
    return [f"{label} on {process.host}" for label, process in zip(labels, processes, strict=True)]


def store_name(labels: Sequence[str], processes: Sequence[Process], rank: int) -> str:
    """Returns how a rank names the holder of the job's store: its launcher or another machine."""
    if processes[rank].has_store:
        return "the launcher"
    there = [other for other, process in enumerate(processes) if process.has_store]
    if not there:
        return "the machine of the job's store"
    ranks = ", ".join(labels[other] for other in there)
    return f"{processes[there[0]].host}, the machine of {ranks} and of the job's store,"


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(FileNotFoundError):  # a kernel without such containers
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    return boot
