"""dicomm's latency and bandwidth over verbs beside perftest's, turn by turn in one guest.

Both ends share the guest's one processor. perftest spins without yielding, so whether a round of
ib_write_lat takes 20 us or a whole tick of 1 ms hangs on the scheduler's mood. Each round begins
with the next of the tools. The rows compare medians over all rounds, and "at its best" compares
with perftest's quickest round; what is asked of a ratio is judged where neither its spread over the
rounds nor a peer that only lacked the processor leaves a doubt.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from evidence import Row, row, show

from dicomm.bench.judging import row_over_rounds
from hyperhetero.cli import CommandLine

app = CommandLine()
DICOMM_PERF = Path(__file__).resolve().parent.parent / "dicomm" / "lib" / "dicomm-perf"
DEVICES = ("rxe0", "rxe1")  # the two ends of a cable; rank r of dicomm's pair has the r-th
SERVER = "10.1.0.2"
GID_INDEX = 1  # RoCE v2 over IPv4
DEADLINE_S = 60.0
ATTEMPTS = 8
BAR = 1.25
LATENCY_BYTES = (8, 4096)
BANDWIDTH_BYTES = 1 << 20


class Failed(Exception):
    """One sentence for the person at the terminal."""


# --- perftest ----------------------------------------------------------------------------------


def cycles_per_us() -> float:
    """The rate of the processor's time stamp counter, in which perftest counts."""
    code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(bytes.fromhex("0f3148c1e2204809d0c3"))  # rdtsc; shl rdx, 32; or rax, rdx; ret
    read_counter = ctypes.CFUNCTYPE(ctypes.c_uint64)(
        ctypes.addressof(ctypes.c_char.from_buffer(code))
    )
    start_ns, start = time.monotonic_ns(), read_counter()
    time.sleep(0.2)
    return (read_counter() - start) / (time.monotonic_ns() - start_ns) * 1e3


class Perftest:
    """The tools of Debian's perftest: a server on one device, a client on the other."""

    def __init__(self) -> None:
        self._cycles_per_us = cycles_per_us()
        self._port = 18_500

    def latency_us(self, tool: str, size_bytes: int, iterations: int) -> float:
        """The median half round trip (of a read: the whole operation)."""
        fields = self._run(tool, size_bytes, iterations, "-C")  # -C: in cycles, see _run
        return float(fields[4]) / self._cycles_per_us

    def bandwidth_mb_s(self, tool: str, size_bytes: int, iterations: int) -> float:
        """Millions of bytes a second, on average over the run."""
        for _ in range(ATTEMPTS):
            average = float(self._run(tool, size_bytes, iterations)[3]) * (1 << 20) / 1e6
            if math.isfinite(average) and average > 0:
                return average
        raise Failed(f"{tool} could not tell the processor's frequency in {ATTEMPTS} attempts")

    def _run(self, tool: str, size_bytes: int, iterations: int, *more: str) -> list[str]:
        """The fields of the tool's one line of figures.

        perftest derives the processor's frequency from samples which a busy guest spoils; its
        figures are then inf or 0, but for those in cycles.
        """
        self._port += 1
        common = ["-x", str(GID_INDEX), "-p", str(self._port), "-s", str(size_bytes)]
        common += ["-n", str(iterations), "-F", *more]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        try:
            server = subprocess.Popen([tool, "-d", DEVICES[1], *common], text=True, **pipes)
        except FileNotFoundError:
            raise Failed(f"{tool} is missing: install Debian's package perftest") from None
        try:
            self._wait_until_it_listens(tool, server)
            client = subprocess.run(
                [tool, "-d", DEVICES[0], *common, SERVER], text=True, timeout=DEADLINE_S, **pipes
            )
            server.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise Failed(f"{tool} took longer than {DEADLINE_S:.0f} s") from None
        finally:
            server.kill()
            server.communicate()
        for line in client.stdout.splitlines():
            if line.split()[:2] == [str(size_bytes), str(iterations)]:
                return line.split()
        last = (client.stdout.strip().splitlines() or ["no output"])[-1]
        raise Failed(f"{tool} ended with code {client.returncode}: {last}")

    def _wait_until_it_listens(self, tool: str, server: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        wanted = f"{self._port:04X} 00000000:0000 0A"  # a listening socket in /proc/net/tcp
        while wanted not in Path("/proc/net/tcp").read_text():
            if server.poll() is not None or time.monotonic() > deadline:
                output = server.communicate()[0] if server.poll() is not None else ""
                last = (output.strip().splitlines() or ["no output"])[-1]
                raise Failed(f"{tool}'s server does not listen: {last}")
            time.sleep(0.01)


# --- dicomm ------------------------------------------------------------------------------------


def dicomm_perf(mode: str, size_bytes: int, seconds: float, folder: Path) -> dict[str, Any]:
    """What dicomm-perf's rank 0 says of one size; the folder is where the ranks meet."""
    processes = []
    secret = secrets.token_hex(16)
    for rank, device in enumerate(DEVICES):
        command = [DICOMM_PERF, mode, "--store", folder, "--rank", rank]
        command += ["--transport", "verbs", "--sizes", size_bytes, "--seconds", seconds]
        environment = os.environ | {"DICOMM_SECRET": secret, "DICOMM_NICS": device}
        processes.append(
            subprocess.Popen(
                [str(each) for each in command],
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    try:
        ended = [process.communicate(timeout=DEADLINE_S) for process in processes]
    except subprocess.TimeoutExpired:
        raise Failed(f"dicomm-perf {mode} took longer than {DEADLINE_S:.0f} s") from None
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, ended, strict=True):
        if process.returncode != 0:
            first = (errors.strip().splitlines() or ["no message"])[0]
            raise Failed(f"dicomm-perf {mode} ended with code {process.returncode}: {first}")
    figures: dict[str, Any] = json.loads(ended[0][0].splitlines()[0])
    return figures


# --- the table ---------------------------------------------------------------------------------

Samples = dict[str, list[float]]
LATENCY_TOOLS = ("ib_write_lat", "ib_send_lat", "ib_read_lat")
BANDWIDTH_TOOLS = ("ib_write_bw", "ib_read_bw")
WAITED = 2.0  # times perftest's best latency: a median above it waited for the processor


def measure(rounds: int, with_dicomm: bool, advance: Callable[[], None]) -> Samples:
    """Samples by name, one a round: "dicomm latency 8", "ib_write_lat 8", ...; in us, or MB/s."""
    perftest = Perftest()
    samples: Samples = defaultdict(list)
    with tempfile.TemporaryDirectory() as top:
        cases = list(_cases(perftest, with_dicomm, Path(top)))
        for turn in range(rounds):
            first = turn % len(cases)
            for name, take in cases[first:] + cases[:first]:
                samples[name].append(take(turn))
            advance()
    return samples


def _cases(
    perftest: Perftest, with_dicomm: bool, top: Path
) -> Iterator[tuple[str, Callable[[int], float]]]:
    """The name of each sample of a round, and what takes it, given the round's number."""

    def dicomm(mode: str, size_bytes: int, seconds: float, figure: str, turn: int) -> float:
        folder = top / f"{turn}-{mode}-{size_bytes}"
        return float(dicomm_perf(mode, size_bytes, seconds, folder)[figure])

    for size in LATENCY_BYTES:
        for tool in LATENCY_TOOLS:
            yield f"{tool} {size}", lambda _, of=(tool, size): perftest.latency_us(*of, 1000)
        if with_dicomm:
            yield f"dicomm latency {size}", partial(dicomm, "latency", size, 0.5, "median_us")
    size = BANDWIDTH_BYTES
    for tool in BANDWIDTH_TOOLS:
        yield f"{tool} {size}", lambda _, of=(tool, size): perftest.bandwidth_mb_s(*of, 100)
    if with_dicomm:
        take = partial(dicomm, "bandwidth", size, 1.0, "bytes_per_s")
        yield f"dicomm bandwidth {size}", lambda turn: take(turn) / 1e6


def make_rows(samples: Samples) -> list[Row]:
    """The evidence's rows: what was measured, and the ratios of which something is asked."""
    rows: list[Row] = []
    for size in LATENCY_BYTES:
        name, ours = f"latency, {size} B", samples.get(f"dicomm latency {size}", [])
        theirs = {tool: samples[f"{tool} {size}"] for tool in LATENCY_TOOLS}
        peers = {tool: median(found) for tool, found in theirs.items()}
        rows += [
            row(name, "us", _median(ours), peer=us, peer_name=who) for who, us in peers.items()
        ]
        write, best_us = theirs["ib_write_lat"], min(map(min, theirs.values()))
        at_best = row(
            f"{name}, peer at its best", "us", _median(ours),
            peer=min(write), peer_name="ib_write_lat",
        )  # fmt: skip
        rows.append(at_best)
        if not ours:
            continue
        ratios = [mine / peer for mine, peer in zip(ours, write, strict=True)]
        asked = row_over_rounds(
            f"{name}: dicomm / ib_write_lat", "x", ratios, peer_name="ib_write_lat", bar=BAR
        )
        if median(write) > WAITED * best_us:
            asked["not_judged"] = (
                f"ib_write_lat only lacked a processor: it took {median(write):.0f} us, where "
                f"perftest took {best_us:.0f} us at its best"
            )
        rows.append(asked)
    name = f"bandwidth, {BANDWIDTH_BYTES} B"
    ours = samples.get(f"dicomm bandwidth {BANDWIDTH_BYTES}", [])
    for tool in BANDWIDTH_TOOLS:
        peer = median(samples[f"{tool} {BANDWIDTH_BYTES}"])
        rows.append(
            row(name, "MB/s", _median(ours), peer=peer, peer_name=tool, better="higher")
        )  # fmt: skip
    if ours:
        write = samples[f"ib_write_bw {BANDWIDTH_BYTES}"]
        ratios = [peer / mine for mine, peer in zip(ours, write, strict=True)]
        title = f"{name}: ib_write_bw / dicomm"
        rows.append(row_over_rounds(title, "x", ratios, peer_name="ib_write_bw", bar=BAR))
    return rows


def _median(samples: list[float]) -> float | None:
    return median(samples) if samples else None


@app.command(epilog="Examples:  tools/verbs-bench  |  tools/verbs-bench --rounds 25 --json")
def main(
    rounds: Annotated[int, typer.Option(min=1, help="Turns; the rows hold medians.")] = 9,
    peers_only: Annotated[bool, typer.Option(help="Measure perftest alone.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print evidence for machines.")] = False,
) -> None:
    """Latency and bandwidth of dicomm over verbs beside perftest's, in the RDMA machine.

    perftest and dicomm take turns between two rdma_rxe devices of one guest. 1.25 times
    ib_write_lat's time, and ib_write_bw's rate by 1.25, are asked.
    """
    from rich.console import Console

    from hyperhetero.progress import Progress

    try:
        if not peers_only and not DICOMM_PERF.exists():
            raise Failed(f"{DICOMM_PERF} is not built: bash tools/setup builds it")
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("measuring", total=rounds)
            samples = measure(rounds, not peers_only, lambda: bar.advance(task))
    except Failed as failure:
        print(f"verbs-bench: {failure}", file=sys.stderr)
        raise typer.Exit(1) from None
    where = f"{rounds} rounds in the RDMA machine (one processor, rdma_rxe devices)"
    show("verbs-bench", make_rows(samples), [where], as_json)


if __name__ == "__main__":
    app()
