"""UCX, by its own ucx_perftest: tag matching, which MPI libraries build on.

ucx_perftest never writes to the buffer that it sends, which so is the kernel's one page of zeros,
again and again, and always in the cache. So it is asked for messages of up to a page between
processes of this machine; longer ones go through UCX from MPI, by mpi.c.
"""

from __future__ import annotations

import csv
import shutil
from typing import ClassVar

from dicomm.bench.oneshot import OneShot, free_port, run_pair
from dicomm.bench.timing import Failed, Order, Timing


def why_absent() -> str | None:
    return None if shutil.which("ucx_perftest") else "ucx_perftest is not installed"


PAGE_BYTES = 4096


class Ucx(OneShot):
    TLS: ClassVar = {"shm": "posix,cma", "tcp": "tcp", "verbs": "rc_v,ud_v"}

    def __init__(self, name: str, transport: str, nics: tuple[str, ...]) -> None:
        super().__init__(name)
        self._longest_bytes = None if transport == "verbs" else PAGE_BYTES
        # Its buffers in huge pages, as everyone's.
        self._environments = [
            {"UCX_TLS": self.TLS[transport], "UCX_ALLOC_PRIO": "thp,mmap"} for _ in range(2)
        ]
        if transport == "tcp":
            for environment in self._environments:
                environment["UCX_NET_DEVICES"] = "lo"
        for rank, nic in enumerate(nics):
            self._environments[rank]["UCX_NET_DEVICES"] = f"{nic}:1"

    def measure(self, order: Order) -> Timing:
        if order.kind == "bi":
            raise Failed("ucx_perftest has no bidirectional test")
        if self._longest_bytes and order.bytes > self._longest_bytes:
            raise Failed("ucx_perftest would send one page of zeros; see MPI over UCX")
        port = free_port()
        test = "tag_lat" if order.kind == "latency" else "tag_bw"
        count = order.count * order.window
        words = ["-p", str(port), "-t", test, "-s", str(order.bytes), "-n", str(count), "-f", "-v"]
        words += ["-w", str(order.untimed * order.window), "-O", str(order.window)]
        output = run_pair(
            ["ucx_perftest", *words],
            ["ucx_perftest", "127.0.0.1", *words],
            self._environments,
            port,
        )[1]
        rows = list(csv.reader(output.splitlines()))
        names, values = rows[-2], rows[-1]
        found = dict(zip(names, values, strict=False))
        if order.kind == "latency":
            return Timing(float(found["50.0_percentile_lat"]), None)
        return Timing(order.window * 1e6 / float(found["overall_mr"]), None)
