"""Several guests of tools/rdma-machine on two networks: guests.py FOLDER MACHINES NETEM LIMIT_S.

FOLDER has what rdma-machine gives to each guest: environment, command and cpuinfo. NETEM is what
the guests' interfaces do to packets, as tc has it. What each says is printed line by line with its
name. The exit code is the worst of all.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from switch import Switch

HERE = Path(__file__).resolve().parent
NETWORKS = ("network0", "network1")  # the switch's sockets, in FOLDER
MTU_BYTES = 4200  # RoCE's 4096 and its headers
GIVEN = ("environment", "command", "cpuinfo")
POLL_S = 0.05
END_S = 30  # timeout kills after five seconds what does not end
TIMED_OUT = (124, 128 + signal.SIGKILL, -signal.SIGKILL)  # of timeout
FAILED = 125
LAST_LINES = 20


class GuestsError(RuntimeError):
    """A guest ended without its command's exit code; `code` is that of the tool."""

    def __init__(self, code: int, what: str) -> None:
        super().__init__(what)
        self.code = code


class Guest:
    def __init__(self, number: int, machines: int, netem: str) -> None:
        self.name = f"machine-{number}"
        self.folder = Path(self.name)
        self.folder.mkdir()
        for name in GIVEN:
            shutil.copy(name, self.folder)
        addresses = ",".join(f"10.1.0.{other + 1}" for other in range(machines))
        with (self.folder / "environment").open("a") as file:
            file.write(f"export HYPERHETERO_MACHINE={number} HYPERHETERO_MACHINES={addresses}\n")
        (self.folder / "network").write_text(
            f"number={number} machines={machines} netem={shlex.quote(netem)}\n"
        )
        cables = [
            f"vec{i}:transport=bess,dst=../{path},mac=02:00:00:00:{i + 1:02x}:{number + 1:02x},"
            f"mtu={MTU_BYTES}"
            for i, path in enumerate(NETWORKS)
        ]
        self.process = subprocess.Popen(
            [HERE / "boot", self.folder, str(number), *cables],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self.copying = threading.Thread(target=self._copy, daemon=True)
        self.copying.start()

    def _copy(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            print(f"{self.name} | {line}", end="" if line.endswith("\n") else "\n", flush=True)

    def is_up(self) -> bool:
        return (self.folder / "up").exists()

    def let_go(self) -> None:
        """Starts its command."""
        (self.folder / "go").touch()

    def code(self, limit_s: str) -> int:
        """Returns the exit code of its command, once the guest has ended. Raises GuestsError."""
        self.copying.join(END_S)
        status = self.folder / "status"
        if status.exists():
            return int(status.read_text())
        if self.process.returncode in TIMED_OUT:
            raise GuestsError(
                TIMED_OUT[0], f"the time limit of {limit_s} s has passed: the guests were ended"
            )
        for name in ("log", "console"):
            path = self.folder / name
            lines = path.read_text(errors="replace").splitlines() if path.exists() else []
            print(*lines[-LAST_LINES:], sep="\n", file=sys.stderr)
        raise GuestsError(
            FAILED,
            f"the guest {self.name} ended without a result (code {self.process.returncode})",
        )


def end(guests: Sequence[Guest]) -> None:
    for guest in guests:
        guest.process.terminate()
    for guest in guests:
        guest.process.wait(END_S)


def run(machines: int, netem: str, limit_s: str) -> int:
    """Runs the command on all machines at once, and returns the worst exit code."""
    caller = os.getppid()
    switch = Switch(NETWORKS)
    guests: list[Guest] = []
    worst, all_up = 0, False
    try:
        for number in range(machines):
            guests.append(Guest(number, machines, netem))
        going = list(guests)
        while going and os.getppid() == caller:  # without its caller nobody waits for this
            switch.forward_for(POLL_S)
            if not all_up and all(guest.is_up() for guest in guests):
                all_up = True
                for guest in guests:
                    guest.let_go()
            for guest in [guest for guest in going if guest.process.poll() is not None]:
                going.remove(guest)
                worst = max(worst, guest.code(limit_s))
    finally:
        end(guests)
    return worst


def main() -> int:
    folder, machines, netem, limit_s = sys.argv[1:]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda n, _: sys.exit(128 + n))
    os.chdir(folder)  # the paths of the sockets are short
    try:
        return run(int(machines), netem, limit_s)
    except GuestsError as error:
        print(f"rdma-machine: {error}", file=sys.stderr)
        return error.code


if __name__ == "__main__":
    sys.exit(main())
