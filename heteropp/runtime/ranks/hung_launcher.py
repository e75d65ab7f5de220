"""Ends a torchrun that waits for the answer of a store whose machine has vanished.

Its calls of the store have no deadline (torch 2.13), signals do not reach it in one, and the
operating system gives the connection up after a quarter of an hour. A torchrun that is well
collects its processes soon after their end; whether it does so, and may start them again, is seen
by a small process that outlives them: this file, with two process descriptors as its arguments.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

PATIENCE_S = 10.0  # more than torchrun sleeps from one look at its processes to the next


def end_if_hung(launcher: int) -> None:
    """Kills this process's launcher unless it collects this process, which is about to end."""
    with contextlib.suppress(OSError):  # this process has to end all the same
        descriptors = [os.pidfd_open(os.getpid()), os.pidfd_open(launcher)]
        subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *map(str, descriptors)],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )


def _end(launched: int, launcher: int) -> None:
    end = select.poll()
    end.register(launched, select.POLLIN)
    end.poll()
    time.sleep(PATIENCE_S)
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(launched, 0)  # it is still to be collected
        signal.pidfd_send_signal(launcher, signal.SIGKILL)
        print("torchrun does not hear its store either, and was killed", file=sys.stderr)


if __name__ == "__main__":
    _end(int(sys.argv[1]), int(sys.argv[2]))
