"""Where the process of a rank runs, and which others run on its machine."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from heteropp.runtime.ranks.store import is_here

CREDENTIALS = struct.Struct("3i")  # process, user and group of who listens
ANSWER_S = 5.0


class Presence:
    """A local socket that shows to other processes of this machine that this one is on it.

    They may speak to it there, message by message.
    Clones of a virtual machine have the same names for it, and process numbers of their own.
    """

    def __init__(self, rank: int) -> None:
        self.name = f"heteropp-{rank}-{os.getpid()}-{secrets.token_hex(8)}"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.bind(f"\0{self.name}")  # has no file, and ends with the process
        self.socket.listen(socket.SOMAXCONN)
        self.socket.setblocking(False)


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
        connection = self.call()
        if connection is not None:
            connection.close()
        return connection is not None

    def call(self) -> socket.socket | None:
        """Connects to its Presence; None where it has none on this machine."""
        caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.suppress(OSError):
            caller.settimeout(ANSWER_S)
            caller.connect(f"\0{self.presence}")
            if process_of(caller) == self.number:
                return caller
        caller.close()
        return None


def process_of(connection: socket.socket) -> int:
    """Returns the number, on this machine, of the process at the other end of a local socket."""
    words = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return CREDENTIALS.unpack(words)[0]


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(FileNotFoundError):  # a kernel without such containers
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    return boot
