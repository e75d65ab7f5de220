"""Where the ranks of a job run, and what they and their machines are called."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from heteropp.description.files import FileError
from heteropp.process_groups.control import Control
from heteropp.process_groups.seals import UntrueError
from heteropp.runtime.ranks.secret import unlike_secrets
from heteropp.runtime.ranks.store import is_here

CREDENTIALS = struct.Struct("3i")  # process, user and group of who listens
ANSWER_S = 5.0


class Presence:
    """A local socket that shows to other processes of this machine that this one is on it.

    Clones of a virtual machine have the same names for it, and process numbers of their own.
    """

    def __init__(self, rank: int) -> None:
        self.name = f"heteropp-{rank}-{os.getpid()}-{secrets.token_hex(8)}"
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(f"\0{self.name}")  # has no file, and ends with the process
        self.socket.listen(socket.SOMAXCONN)


class Process(NamedTuple):
    """Where the process of a rank runs."""

    machine: str  # tells machines, and containers with their own process numbers, apart
    host: str
    number: int  # on its machine
    has_store: bool  # whether the job's store is on its machine
    presence: str  # name of its Presence

    @staticmethod
    def own(store: dist.Store, presence: Presence) -> Process:
        machine, host = _machine(), socket.gethostname()
        return Process(machine, host, os.getpid(), is_here(store), presence.name)

    def shares_machine(self, own: Process) -> bool:
        """Whether it is on this process's machine, where its number means what it means here."""
        return self.machine == own.machine and self._is_present()

    def _is_present(self) -> bool:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as caller:
            caller.settimeout(ANSWER_S)
            caller.connect(f"\0{self.presence}")
            words = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            return CREDENTIALS.unpack(words)[0] == self.number
        return False


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
    if len({(process.machine, process.host) for process in processes}) == 1:
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
