"""Runs training scripts one after another, each in a process forked from one that has torch loaded.

`python -P run_server.py` reads one JSON request a line and answers each with one line. It imports
torch but no device: which chip the script gets is decided in its own process, by its environment.
That makes a run of a few steps several times faster than a new Python would be. `runs.py` is the
other end.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import signal
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, TypeAdapter  # noqa: F401  (what ditorch takes longest to load)


def main() -> None:
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer loads half of torch: here, once
    gc.freeze()  # what is loaded stays shared with the processes forked
    for line in open(0, "rb", buffering=0):  # noqa: SIM115  (`select` must see what is unread)
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            _leave(_run(request))
        with suppress(OSError):  # done here too, lest the group be killed before it is made
            os.setpgid(pid, pid)
        print(json.dumps(_wait(pid, request["deadline_s"])), flush=True)


def _wait(pid: int, deadline_s: float) -> dict[str, Any]:
    """Waits for the script; ends it with all its children at its deadline, or with its asker."""
    ended = os.pidfd_open(pid)
    ready, _, _ = select.select([ended, sys.stdin], [], [], deadline_s)
    os.close(ended)
    timed_out = ended not in ready
    if timed_out:
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return {"exit_code": os.waitstatus_to_exitcode(status), "timed_out": timed_out}


def _run(request: dict[str, Any]) -> int:
    """Does in the forked process what `python script args` does, and returns the exit code."""
    _redirect(request["log"])
    os.environ.clear()
    os.environ.update(request["environment"])
    script = request["script"]
    sys.argv = [script, *request["args"]]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        from ditorch.precision.settings import open_configured_tools

        open_configured_tools()
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _leave(exit_code: int) -> None:
    """Ends the process as Python does, but leaves its memory to the system: that is faster."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the script's threads
    atexit._run_exitfuncs()  # where the tools write their files
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _redirect(log: str) -> None:
    null, file = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(null, 0)
    for stream in (1, 2):
        os.dup2(file, stream)


if __name__ == "__main__":
    main()
