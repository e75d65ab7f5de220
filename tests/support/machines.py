"""Machines of one host: namespaces that share a kernel, a disk and nothing else.

Each has its own network, host name, processes, System V memory and mounts, with a /dev/shm and an
/etc/hosts of its own; a switch, which is one more network namespace, connects them. All of it ends
with the process that made it, as nothing has a name outside of the namespaces.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import pytest
from installed import NAMESPACES, lack, need

NETWORK = "10.77.0"
TEMPORARY = "/dev/shm/tmp"  # of a machine: its shared memory is its own
SETUP_S = 30
# the first process: whoever is orphaned is reaped, and all end when the test's process does
FIRST = """
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print(flush=True)
sys.stdin.read()
"""

needed = pytest.mark.skipif(os.geteuid() != 0, reason="{}; {} runs it".format(*NAMESPACES))


class Namespaces:
    """What one process was unshared into."""

    def __init__(self, *kinds: str) -> None:
        self.keeper = subprocess.Popen(
            ["unshare", *kinds, "--kill-child", sys.executable, "-I", "-S", "-c", FIRST],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.keeper.stdout and self.keeper.stderr
        if not self.keeper.stdout.readline():  # the first process is there, or nothing will be
            self.keeper.wait(SETUP_S)
            lack(*NAMESPACES)
        children = Path(f"/proc/{self.keeper.pid}/task/{self.keeper.pid}/children").read_text()
        self.first = int(children)  # its number outside

    def inside(self, *command: str) -> list[str]:
        """A command line that runs a command in the namespaces, in this folder."""
        return ["nsenter", "--all", f"--target={self.first}", f"--wd={Path.cwd()}", *command]

    def do(self, script: str) -> None:
        subprocess.run(self.inside("sh", "-ec", script), check=True, timeout=SETUP_S)

    def end(self) -> None:
        """Kills every process in there."""
        self.keeper.kill()  # and with it the first one, whose end is that of all others
        self.keeper.wait(SETUP_S)
        for pipe in (self.keeper.stdin, self.keeper.stdout, self.keeper.stderr):
            assert pipe
            pipe.close()


class Machine:
    def __init__(self, number: int, hosts: Path, switch: Namespaces) -> None:
        self.name, self.address = f"machine-{number}", _address(number)
        self.switch, self.port = switch, f"port{number}"
        self.namespaces = Namespaces(
            *("--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc")
        )
        switch.do(
            f"ip link add {self.port} type veth peer name eth0 netns {self.namespaces.first};"
            f"ip link set {self.port} master bridge up"
        )
        self.namespaces.do(
            f"hostname {self.name}; ip link set lo up; ip link set eth0 up;"
            f"ip address add {self.address}/24 dev eth0;"
            f"mount -t tmpfs -o size=1g memory /dev/shm; mkdir {TEMPORARY};"
            f"mount --bind {hosts} /etc/hosts"
        )

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], output: IO[str]
    ) -> subprocess.Popen[str]:
        """Python, with what follows "python" on a command line; both outputs go to one file."""
        return subprocess.Popen(
            self.namespaces.inside(sys.executable, *arguments),
            env={**environment, "TMPDIR": TEMPORARY},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def cut_off(self) -> None:
        """Drops all packets to and from the machine; no connection is closed by that."""
        self.switch.do(f"ip link set {self.port} nomaster")

    def come_back(self) -> None:
        self.switch.do(f"ip link set {self.port} master bridge")

    def kill(self) -> None:
        """All of its processes at once; its kernel lives on, and hangs up for them."""
        self.namespaces.end()


@contextmanager
def machines(count: int, folder: Path) -> Iterator[list[Machine]]:
    """Machines that know each other by name; the folder is for what describes them."""
    need("iproute2", "ip")
    hosts = folder / "hosts"
    names = [f"{_address(number)} machine-{number}" for number in range(count)]
    hosts.write_text("\n".join(["127.0.0.1 localhost", "::1 localhost", *names, ""]))
    with ExitStack() as stack:
        switch = Namespaces("--net", "--fork")
        stack.callback(switch.end)
        switch.do("ip link add bridge type bridge; ip link set bridge up")
        made = []
        for number in range(count):
            made.append(Machine(number, hosts, switch))
            stack.callback(made[-1].kill)
        yield made


def _address(number: int) -> str:
    return f"{NETWORK}.{number + 1}"


def enter(first: int) -> None:
    """This process is on a machine from now on, but for its number and its files.

    first: the number of the machine's first process, `machine.namespaces.first`.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "uts", "ipc"):
        with Path(f"/proc/{first}/ns/{kind}").open() as file:
            if libc.setns(file.fileno(), 0):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
