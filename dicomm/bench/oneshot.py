"""Contestants that start anew for each order: two processes that measure and print."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from dicomm.bench.timing import DEADLINE_S, Failed

Command = Sequence[str | Path]


class OneShot:
    """Two programs, one for each rank, that are done when both have ended."""

    def __init__(self, name: str) -> None:
        self.name = name

    def wait_ready(self) -> None:
        pass

    def close(self) -> None:
        pass


def run_pair(
    first: Command,
    second: Command,
    environments: Sequence[Mapping[str, str]],
    listens_on: int | None = None,
) -> list[str]:
    """Runs both to their ends and returns what they printed."""
    processes: list[subprocess.Popen[str]] = []
    deadline = time.monotonic() + 2 * DEADLINE_S
    try:
        for command, environment in zip((first, second), environments, strict=True):
            processes.append(
                subprocess.Popen(
                    [str(word) for word in command],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env={**os.environ, **environment},
                )
            )
            if listens_on is not None and len(processes) == 1:
                _wait_for_listener(listens_on, processes[0], deadline)
        outputs: list[str] = []
        for process in reversed(processes):  # the client's words say what went wrong
            output, complaint = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            if process.returncode != 0:
                words = (complaint.strip() or output.strip()).splitlines()
                raise Failed(
                    f"{Path(str(first[0])).name}: "
                    + (words[-1][:200] if words else f"exit code {process.returncode}")
                )
            outputs.insert(0, output)
        return outputs
    except subprocess.TimeoutExpired:
        raise Failed(
            f"{Path(str(first[0])).name}: not done within {2 * DEADLINE_S:.0f} s"
        ) from None
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for_listener(port: int, process: subprocess.Popen[str], deadline: float) -> None:
    """Waits until something listens on the port, the process ends or the deadline passes.

    It reads /proc and does not connect, for the programs serve only the first that connects.
    """
    listening = re.compile(rf":{port:04X} [0-9A-F]+:0000 0A ")
    while time.monotonic() < deadline and process.poll() is None:
        tables = [Path(f"/proc/net/{table}") for table in ("tcp", "tcp6")]
        if any(listening.search(table.read_text()) for table in tables if table.exists()):
            return
        time.sleep(0.002)
