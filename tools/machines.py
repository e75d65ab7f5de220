"""Runs a command on each of several machines that are namespaces of this one, joined by a switch.

A machine has a network, a host name, processes, System V memory, /dev/shm and /tmp of its own. It
shares this host's kernel and files, those of the working directory included. The machines know
each other by name: the command has the number of its own machine, from 0, in HYPERHETERO_MACHINE,
and the addresses of all, with commas between them, in HYPERHETERO_MACHINES; machine-0 is the name
of the first. The exit code is the worst of all commands'; 77 where this host makes no namespaces.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Annotated

import typer

from hyperhetero.cli import CommandLine

NETWORK = "10.77.0"
MOST = 250  # machines, of a network of /24
SETUP_S = 30
POLL_S = 0.05
REFUSED = 77  # the exit code by which test suites know a test that cannot run here
PROGRAMS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "mount": "mount"}
# the first process: whoever is orphaned is reaped, and all end when the process outside does
FIRST = """
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print(flush=True)
sys.stdin.read()
"""

app = CommandLine()


class MachinesError(RuntimeError):
    """No machines can be made here; `what` is missing, and `remedy` is what helps."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}; {remedy} runs it")
        self.what, self.remedy = what, remedy


class Namespaces:
    """What one process was unshared into."""

    def __init__(self, *kinds: str, around: Namespaces | None = None) -> None:
        """kinds: as unshare's options; around: whose user namespace is taken, if it has one."""
        rights = [kind for kind in (around.kinds if around else ()) if kind == "--user"]
        self.kinds = [*rights, *kinds]
        more = ["--map-root-user"] if "--user" in kinds else []
        more += ["--mount-proc"] if "--pid" in kinds else []
        unshare = ["unshare", "--fork", "--kill-child", *kinds, *more]
        unshare += [sys.executable, "-I", "-S", "-c", FIRST]
        self.keeper = subprocess.Popen(
            around.inside("--no-fork", *unshare) if around else unshare,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.keeper.stdout and self.keeper.stderr
        if not self.keeper.stdout.readline():  # the first process is there, or nothing will be
            self.keeper.wait(SETUP_S)
            said = self.keeper.stderr.read().decode(errors="replace").strip().splitlines()
            why = f" ({said[-1]})" if said else ""
            raise MachinesError(
                f"no namespaces can be made here{why}", "root, or a kernel with user namespaces,"
            )
        children = Path(f"/proc/{self.keeper.pid}/task/{self.keeper.pid}/children").read_text()
        self.first = int(children)  # its number outside

    def inside(self, *command: str) -> list[str]:
        """A command line that runs a command, after options of nsenter's, in this folder there."""
        enter = ["nsenter", "--preserve-credentials", f"--target={self.first}", *self.kinds]
        return [*enter, f"--wdns={Path.cwd()}", *command]

    def do(self, script: str) -> None:
        """Runs a script of the shell. Raises MachinesError."""
        done = subprocess.run(
            self.inside("sh", "-ec", script), capture_output=True, text=True, timeout=SETUP_S
        )
        if done.returncode:
            why = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
            raise MachinesError(
                f"no machines can be made of namespaces here ({why})", "root on a whole machine"
            )

    def end(self) -> None:
        """Kills every process in there."""
        self.keeper.kill()  # and with it the first one, whose end is that of all others
        self.keeper.wait(SETUP_S)
        for pipe in (self.keeper.stdin, self.keeper.stdout, self.keeper.stderr):
            assert pipe
            pipe.close()


class Machine:
    def __init__(self, number: int, names: Sequence[str], shared: Path, switch: Namespaces) -> None:
        """names: of all machines; shared: a folder that they have in common, wherever it is."""
        self.name, self.address = names[number], address_of(number)
        self.switch, self.port = switch, f"port{number}"
        self.processes: list[subprocess.Popen[str]] = []
        self.killed = False
        own = ("--net", "--uts", "--ipc", "--mount", "--pid")
        self.namespaces = Namespaces(*own, around=switch)
        switch.do(
            f"ip link add {self.port} type veth peer name eth0 netns {self.namespaces.first};"
            f"ip link set {self.port} master bridge up"
        )
        hosts = "".join(f"{address_of(i)} {name}\\n" for i, name in enumerate(names))
        self.do(
            f"hostname {self.name}; ip link set lo up; ip link set eth0 up;"
            f"ip address add {self.address}/24 dev eth0;"
            "mount -t tmpfs -o size=1g,mode=1777 memory /dev/shm;"
            f"printf '127.0.0.1 localhost\\n::1 localhost\\n{hosts}' > /dev/shm/hosts;"
            "mount --bind /dev/shm/hosts /etc/hosts; rm /dev/shm/hosts;" + _own_tmp(shared)
        )

    def do(self, script: str) -> None:
        """Runs a script of the shell on the machine, as root. Raises MachinesError."""
        self.namespaces.do(script)

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: IO[str] | int,
        errors: IO[str] | int = subprocess.STDOUT,
    ) -> subprocess.Popen[str]:
        started = subprocess.Popen(
            self.namespaces.inside(*command),
            env={name: value for name, value in environment.items() if name != "TMPDIR"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            text=True,
            errors="replace",
        )
        self.processes.append(started)
        return started

    def cut_off(self) -> None:
        """Drops all packets to and from the machine; no connection is closed by that."""
        self.switch.do(f"ip link set {self.port} nomaster")

    def come_back(self) -> None:
        self.switch.do(f"ip link set {self.port} master bridge")

    def down(self) -> None:
        """Takes the machine's own link down, which its kernel sees."""
        self.do("ip link set eth0 down")

    def up(self) -> None:
        self.do("ip link set eth0 up")

    def stop(self) -> None:
        """Stops all of its processes, as a machine does that is out of breath."""
        self._signal("STOP")

    def go_on(self) -> None:
        self._signal("CONT")
        self._wake()

    def kill(self) -> None:
        """All of its processes at once; its kernel lives on, and hangs up for them."""
        self.killed = True
        self.namespaces.end()
        self._wake()

    def _signal(self, name: str) -> None:
        """Sends a signal to all of its processes, which may not have begun yet, or have ended."""
        self.do(f"kill -{name} -1 2>/dev/null || true")

    def _wake(self) -> None:
        for process in self.processes:  # nsenter had stopped with its command
            process.send_signal(signal.SIGCONT)


EVENTS: dict[str, Callable[[Machine], None]] = {
    "cut-off": Machine.cut_off,
    "come-back": Machine.come_back,
    "down": Machine.down,
    "up": Machine.up,
    "stop": Machine.stop,
    "go-on": Machine.go_on,
    "kill": Machine.kill,
}


@contextmanager
def machines(count: int, shared: Path) -> Iterator[list[Machine]]:
    """Machines that know each other by name; all of them end with the block, or this process.

    shared: a folder that they have in common, as they have the working directory. Raises
    MachinesError.
    """
    for program, package in PROGRAMS.items():
        if not shutil.which(program):
            raise MachinesError(f"{package} is not installed", f"apt-get install {package}")
    rights = () if os.geteuid() == 0 else ("--user",)
    names = [f"machine-{number}" for number in range(count)]
    with ExitStack() as stack:
        switch = Namespaces(*rights, "--net")
        stack.callback(switch.end)
        switch.do("ip link add bridge type bridge; ip link set bridge up")
        made = []
        for number in range(count):
            made.append(Machine(number, names, shared, switch))
            stack.callback(made[-1].kill)
        yield made


def address_of(number: int) -> str:
    return f"{NETWORK}.{number + 1}"


def _own_tmp(shared: Path) -> str:
    """The script that gives a machine a /tmp of its own, but for folders that are needed in it."""
    needed = (shared, Path.cwd(), Path(__file__).parents[1], Path(sys.prefix))
    within = {path.resolve() for path in needed if Path("/tmp") in path.resolve().parents}
    outer = [path for path in sorted(within) if not within & set(path.parents)]
    aside = {path: f"/dev/shm/aside-{i}" for i, path in enumerate(outer)}
    return "".join(
        [f"mkdir {to}; mount --rbind '{path}' {to};" for path, to in aside.items()]
        + ["mount -t tmpfs -o size=1g,mode=1777 memory /tmp;"]
        + [f"mkdir -p '{path}'; mount -n --move {to} '{path}';" for path, to in aside.items()]
        + [f"rmdir {to};" for to in aside.values()]
    )


def enter(first: int) -> None:
    """This process is on a machine from now on, but for its number and its files.

    first: the number of the machine's first process, `machine.namespaces.first`.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "uts", "ipc"):
        with Path(f"/proc/{first}/ns/{kind}").open() as file:
            if libc.setns(file.fileno(), 0):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Event:
    """What happens to a machine at a time."""

    def __init__(self, text: str, count: int) -> None:
        """text: such as "5 cut-off 2". Raises typer.BadParameter."""
        try:
            after, self.name, number = text.split()
            self.after_s, self.machine = float(after), int(number)
            if not (self.after_s >= 0 and self.name in EVENTS and 0 <= self.machine < count):
                raise ValueError
        except ValueError:
            raise typer.BadParameter(
                f"--at is {text!r}, expected seconds, one of {', '.join(EVENTS)}, and a machine "
                f"from 0 to {count - 1}, such as '5 cut-off 0'"
            ) from None


def run(there: Sequence[Machine], command: Sequence[str], events: Sequence[Event]) -> int:
    """Runs a command on all machines, and returns the worst exit code.

    A machine that an event killed counts as one that is gone, and not as one that failed.
    """
    addresses = ",".join(machine.address for machine in there)
    copying = []
    for number, machine in enumerate(there):
        own = {"HYPERHETERO_MACHINE": str(number), "HYPERHETERO_MACHINES": addresses}
        process = machine.start(command, {**os.environ, **own}, subprocess.PIPE)
        copying.append(threading.Thread(target=_copy, args=(machine.name, process), daemon=True))
        copying[-1].start()
    begin_s = time.monotonic()
    due = sorted(events, key=lambda event: event.after_s)
    while any(process.poll() is None for machine in there for process in machine.processes):
        while due and time.monotonic() - begin_s >= due[0].after_s:
            event = due.pop(0)
            machine = there[event.machine]
            print(f"machines: {event.name} {machine.name}", file=sys.stderr, flush=True)
            if not machine.killed:
                EVENTS[event.name](machine)
        time.sleep(POLL_S)
    codes = [p.returncode for machine in there if not machine.killed for p in machine.processes]
    for machine in there:
        machine.kill()  # what a command left behind may hold its output open
    for thread in copying:
        thread.join()
    return max((128 - code if code < 0 else code for code in codes), default=0)


def _copy(name: str, process: subprocess.Popen[str]) -> None:
    """Prints a machine's output line by line, each with its name."""
    assert process.stdout
    for line in process.stdout:
        print(f"{name} | {line}", end="" if line.endswith("\n") else "\n", flush=True)


@app.command(
    help=__doc__,
    epilog="Examples:  tools/machines 2 -- hostname  |  "
    "tools/machines 3 --at '5 cut-off 0' -- bash -c 'ping -c 9 machine-0'",
)
def main(
    count: Annotated[int, typer.Argument(metavar="N", min=1, max=MOST, help="Machines.")],
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="For each.")],
    at: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'SECONDS EVENT MACHINE'",
            help="Something that happens after a time; the events are "
            f"{', '.join(EVENTS)}. May be given several times.",
        ),
    ] = None,
) -> None:
    events = [Event(text, count) for text in at or []]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda n, _: sys.exit(128 + n))
    try:
        with machines(count, Path.cwd()) as there:
            code = run(there, command, events)
    except MachinesError as error:
        print(f"machines: {error}", file=sys.stderr)
        raise typer.Exit(REFUSED) from None
    raise typer.Exit(code)


if __name__ == "__main__":
    app()
