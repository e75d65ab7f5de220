"""How long a rank's host waits for messages, and how much of a core it takes meanwhile."""

from __future__ import annotations

import time


class HostWaits:
    """Adds up the waits that run inside it; taking in what has come is part of them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.cpu_s = 0.0  # of all threads of the process

    def __enter__(self) -> None:
        self._begin_s, self._begin_cpu_s = time.monotonic(), time.process_time()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.monotonic() - self._begin_s
        self.cpu_s += time.process_time() - self._begin_cpu_s

    def add(self, other: HostWaits) -> None:
        self.seconds += other.seconds
        self.cpu_s += other.cpu_s
