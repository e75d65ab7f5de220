"""A lease: how long the members of a node may live on while it does not reach the job's store.

The agent of a node renews it with each heartbeat that the store has taken, from the time at which
the beat was sent; it ends a little before a node counts as lost. A leader that has seen no new beat
of a node for so long knows by that alone that all members of the node have ended, though nobody
can say so: whatever they trained may be trained by others.

The kernel ends a member whose lease has run out, by a timer of its own: also one that was stopped,
which does not run again, and on a machine that slept, as the timer's clock goes on meanwhile.
Nothing is written or sent after that but what the kernel already had from the process: bytes in a
socket's buffer, for processes that have ended as well, and a call of a file system that is under
way. On a virtual machine that its host has paused the clock may stand still with all else: such a
lease runs out later, and nothing is promised of it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from multiprocessing.context import ForkServerContext

# of the silence after which a node is lost: what is left is for a busy machine to end its
# processes, and far more than the clocks of two machines differ by
SHARE = 0.9
FOLLOW_S = 0.25  # from one look of a process at its lease to the next
WORD_S = 0.5  # before the lease runs out, a process that is able to says so, and ends
TIMER_ABSTIME = 1
SIGEV_SIGNAL = 0

libc = ctypes.CDLL(None, use_errno=True)


class _Event(ctypes.Structure):  # struct sigevent, of 64 bytes
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("unused", ctypes.c_char * 48),
    )


class _Times(ctypes.Structure):  # struct itimerspec
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("at_s", ctypes.c_long),
        ("at_ns", ctypes.c_long),
    )


def clock_s() -> float:
    """Returns the seconds since this machine was started, those that it slept included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """The lease of one node, in memory that its agent shares with the members' processes."""

    def __init__(self, context: ForkServerContext, silence_s: float) -> None:
        """silence_s: after which the leader counts a node as lost; context: of the processes."""
        self.length_s = SHARE * silence_s
        self.word_s = self.length_s - WORD_S  # without a beat, after which a process says so
        self.until = context.RawValue(ctypes.c_double, clock_s() + self.length_s)
        self.times_over = 0  # that it had run out when it was renewed

    def renew(self, from_s: float) -> None:
        """from_s: when the beat was sent that the store has taken by now."""
        self.times_over = self.count_over()
        self.until.value = from_s + self.length_s

    def count_over(self) -> int:
        """Returns how many times it has run out by now."""
        return self.times_over + (self.left_s() < 0)

    def left_s(self) -> float:
        return self.until.value - clock_s()

    def is_nearly_over(self) -> bool:
        """Whether a process that has it is to say so now, and end."""
        return self.left_s() < WORD_S


class LeaseTimer:
    """The kernel's timer that kills this process; it has to be set again before it runs out."""

    def __init__(self) -> None:
        self.number = ctypes.c_void_p()
        event = _Event(None, signal.SIGKILL, SIGEV_SIGNAL)
        place = ctypes.byref(self.number)
        _check(libc.timer_create(time.CLOCK_BOOTTIME, ctypes.byref(event), place))

    def follow(self, lease: Lease) -> None:
        """The process ends when the lease runs out that there is now."""
        self._set(lease.until.value)

    def stop(self) -> None:
        self._set(0)

    def _set(self, at_s: float) -> None:
        times = _Times(0, 0, int(at_s), int(at_s % 1 * 1e9))
        _check(libc.timer_settime(self.number, TIMER_ABSTIME, ctypes.byref(times), None))


def _check(code: int) -> None:
    if code:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
