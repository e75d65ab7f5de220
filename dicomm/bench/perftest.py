"""perftest, the RDMA community's ib_*_lat and ib_*_bw."""

from __future__ import annotations

import math
import re
import shutil
from functools import cache
from pathlib import Path

from dicomm.bench.oneshot import OneShot, free_port, run_pair
from dicomm.bench.timing import Failed, Order, Timing

VERBS = ("write", "send")
ATTEMPTS = 5  # it tells time by the processor's frequency, which it may fail to learn


def why_absent() -> str | None:
    if not shutil.which("ib_write_lat"):
        return "ib_write_lat is not installed"
    return None if rdma_devices() else "there is no RDMA device"


@cache
def rdma_devices() -> tuple[str, ...]:
    root = Path("/sys/class/infiniband")
    return tuple(sorted(entry.name for entry in root.iterdir())) if root.is_dir() else ()


class Perftest(OneShot):
    def __init__(self, name: str, verb: str, nics: tuple[str, ...]) -> None:
        super().__init__(name)
        self._verb, self._nics = verb, nics

    def measure(self, order: Order) -> Timing:
        is_latency = order.kind == "latency"
        program = f"ib_{self._verb}_{'lat' if is_latency else 'bw'}"
        words = ["-s", str(order.bytes), "-n", str(max(5, order.count * order.window)), "-F"]
        if not is_latency:
            words += ["-t", str(order.window), "-Q", str(max(1, order.window // 4))]
        if order.kind == "bi":
            words.append("-b")
        for _ in range(ATTEMPTS):
            numbers = self._run(program, order.bytes, words)
            if all(math.isfinite(number) for number in numbers) and numbers[4] > 0:
                break
        else:
            raise Failed(f"{program} printed no usable numbers")
        if is_latency:  # bytes, iterations, min, max, typical, average, stdev, 99%, 99.9%
            return Timing(numbers[4], numbers[7])
        # bytes, iterations, peak and average in MiB/s, messages in millions/s, of both directions
        messages = order.window * (2 if order.kind == "bi" else 1)
        return Timing(messages / numbers[4], None)

    def _run(self, program: str, size_bytes: int, words: list[str]) -> list[float]:
        port = free_port()
        words = ["-p", str(port), *words]
        output = run_pair(
            [program, "-d", self._nics[0], *words],
            [program, "-d", self._nics[1], *words, "127.0.0.1"],
            [{}, {}],
            port,
        )[1]
        line = re.search(rf"^\s*{size_bytes}\s+\d+\s.*$", output, re.MULTILINE)
        if not line:
            raise Failed(f"{program} printed no result")
        return [float(word) for word in line.group().split()]
