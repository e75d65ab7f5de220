"""Python processes for the price of a fork: they begin with torch imported.

Each worker of pytest has one server, which imports what takes seconds and chooses no device: the
environment of each process does. `start` and `run` take what follows "python" on a command line.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from multiprocessing import util
from pathlib import Path
from typing import Any, NoReturn

MOST_BYTES = 128 << 10  # of a request


class Forked:
    """A forked Python process in its own session, with what tests use of subprocess.Popen."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path | None
    ) -> None:
        self.args, self.returncode = list(arguments), None
        self._out = tempfile.TemporaryFile("a+")  # noqa: SIM115
        self._err = tempfile.TemporaryFile("a+")  # noqa: SIM115
        request = {
            "arguments": self.args,
            "environment": dict(environment),
            "folder": str(folder or Path.cwd()),
        }
        self._answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        files = [self._out.fileno(), self._err.fileno(), theirs.fileno()]
        socket.send_fds(_server(), [json.dumps(request).encode()], files)
        theirs.close()
        self.pid = int(self._answer(60))

    def _answer(self, timeout_s: float | None) -> str:
        """Waits for the server's answer: first the process's number, then its exit code."""
        if not select.select([self._answers], [], [], timeout_s)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout_s or 0)
        if not (answer := self._answers.recv(100)):
            raise RuntimeError("the server of forked processes is gone")
        return answer.decode()

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = int(self._answer(timeout))
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        for file in (self._out, self._err):
            file.seek(0)
        return self._out.read(), self._err.read()

    def errors(self) -> str:
        """What it printed to stderr so far."""
        return os.pread(self._err.fileno(), MOST_BYTES, 0).decode()

    def lines(self) -> Iterator[str]:
        """What it prints, line by line, until it ends."""
        begin, text, running = 0, b"", True
        while running or text:
            running = self.poll() is None
            text = os.pread(self._out.fileno(), MOST_BYTES, begin)
            whole = text[: text.rfind(b"\n") + 1]
            begin += len(whole)
            yield from whole.decode().splitlines()
            if not whole and running:
                time.sleep(0.002)
            elif not whole:
                return

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(
    arguments: Sequence[str], environment: Mapping[str, str], folder: Path | None = None
) -> Forked:
    return Forked(arguments, environment, folder)


def run(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: Path | None = None,
    *,
    timeout_s: float,
) -> subprocess.CompletedProcess[str]:
    process = Forked(arguments, environment, folder)
    try:
        stdout, stderr = process.communicate(timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
        raise
    return subprocess.CompletedProcess(process.args, process.wait(), stdout, stderr)


@cache
def _server() -> socket.socket:
    """It ends when this process, which holds the other end, does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-P", __file__, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours


# ---------------------------------------------------------------- the server


def serve(requests: socket.socket) -> dict[str, Any] | None:
    """Forks a process for each request. Returns the request in such a process, None in the end."""
    running: dict[int, tuple[int, socket.socket]] = {}  # by pidfd: pid, and who asks
    while True:
        for ready in select.select([requests, *running], [], [])[0]:
            if ready is not requests:
                pid, answers = running.pop(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with answers:
                    answers.send(b"%d" % code)
                os.close(ready)
                continue
            message, files, *_ = socket.recv_fds(requests, MOST_BYTES, 3)
            if not message:  # pytest is gone
                for pid, _ in running.values():
                    os.killpg(pid, signal.SIGKILL)
                return None
            if (pid := os.fork()) == 0:
                become(files)
                for held, (_, answers) in running.items():
                    os.close(held)
                    answers.close()
                requests.close()
                return json.loads(message)
            out, err, answer = files
            os.close(out)
            os.close(err)
            answers = socket.socket(fileno=answer)
            answers.send(b"%d" % pid)
            running[os.pidfd_open(pid)] = pid, answers


def become(files: list[int]) -> None:
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate([null, *files[:2]]):
        os.dup2(file, number)
    for file in (null, *files):
        os.close(file)


def obey(request: dict[str, Any]) -> None:
    """What `python arguments...` does, in a process that has done its imports already."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    first, *rest = request["arguments"]
    sys.orig_argv = [sys.executable, first, *rest]
    sys.path[:0] = folders
    if any(argument.startswith("heteropp.") for argument in request["arguments"][:2]):
        await_fork_server()
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif first == "-m":
        sys.argv = ["-m", *rest[1:]]  # as while Python looks for the module
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")


def exit_code(request: dict[str, Any]) -> int:
    try:
        obey(request)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def await_fork_server() -> None:
    """Forks, before anything else, what will be this process's fork server if it wants one.

    multiprocessing would start a new Python, which imports torch anew.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if (pid := os.fork()) == 0:
        ours.close()
        serve_forks(theirs)
    theirs.close()
    start = util.spawnv_passfds

    def hand_over(path: bytes, arguments: list[str], files: list[int]) -> int:
        if "multiprocessing.forkserver" not in arguments[-1] or ours.fileno() < 0:
            return start(path, arguments, files)
        request = {"program": arguments[-1], "files": files, "environment": dict(os.environ)}
        with ours:
            socket.send_fds(ours, [json.dumps(request).encode()], files)
        return pid

    util.spawnv_passfds = hand_over


def serve_forks(requests: socket.socket) -> NoReturn:
    """Is the fork server that is asked for, under the numbers of files that its program names."""
    try:
        message, files, *_ = socket.recv_fds(requests, MOST_BYTES, 3)
        if message:  # else the process has ended without one
            request = json.loads(message)
            os.environ.clear()
            os.environ.update(request["environment"])
            above = max(request["files"]) + 1
            moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above) for file in files]
            for file in (requests.detach(), *files):
                os.close(file)
            for file, number in zip(moved, request["files"], strict=True):
                os.dup2(file, number)
                os.close(file)
            exec(request["program"], {})
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def leave(code: int) -> None:
    """Ends the process as Python does, but leaves its memory to the system: that is faster."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    import gc

    import pydantic  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import torch.distributed

    torch.optim.SGD([torch.zeros(1)])  # the first optimizer loads half of torch: here, once
    gc.freeze()  # what is loaded stays shared with the processes forked
    if asked := serve(socket.socket(fileno=int(sys.argv[1]))):
        leave(exit_code(asked))
