"""dicomm's latency and bandwidth over verbs beside perftest's, turn by turn in one guest.

Both ends share the guest's one processor. perftest spins without yielding, so whether a round of
ib_write_lat takes 20 us or a whole tick of 1 ms hangs on the scheduler's mood: the rows compare
medians over all rounds; "at its best" compares with perftest's quickest round.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import platform
import secrets
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
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


def measure(rounds: int, with_dicomm: bool, advance: Callable[[], None]) -> Samples:
    """Samples by name: "dicomm latency 8", "ib_write_lat 8", ...; latency in us, else MB/s."""
    perftest = Perftest()
    samples: Samples = defaultdict(list)
    with tempfile.TemporaryDirectory() as top:
        for turn in range(rounds):
            for size in LATENCY_BYTES:
                for tool in ("ib_write_lat", "ib_send_lat", "ib_read_lat"):
                    samples[f"{tool} {size}"].append(perftest.latency_us(tool, size, 1000))
                if with_dicomm:
                    figures = dicomm_perf("latency", size, 0.5, Path(top) / f"{turn}-{size}")
                    samples[f"dicomm latency {size}"].append(figures["median_us"])
            size = BANDWIDTH_BYTES
            for tool in ("ib_write_bw", "ib_read_bw"):
                samples[f"{tool} {size}"].append(perftest.bandwidth_mb_s(tool, size, 100))
            if with_dicomm:
                figures = dicomm_perf("bandwidth", size, 1.0, Path(top) / f"{turn}-bandwidth")
                samples[f"dicomm bandwidth {size}"].append(figures["bytes_per_s"] / 1e6)
            advance()
    return samples


def make_rows(samples: Samples) -> list[dict[str, Any]]:
    """The evidence's rows; a ratio above 1 is slower than the peer."""
    rows: list[dict[str, Any]] = []

    def add(name: str, ours: list[float], peer: float, peer_name: str, bar: float | None) -> None:
        mine = median(ours) if ours else None
        higher = "bandwidth" in name
        ratio = None if mine is None else (peer / mine if higher else mine / peer)
        rows.append(
            {
                "name": name,
                "unit": "MB/s" if higher else "us",
                "ours": mine,
                "peer": peer,
                "peer_name": peer_name,
                "ratio": ratio,
                "bar": bar,
                "better": "higher" if higher else "lower",
            }
        )

    for size in LATENCY_BYTES:
        name, ours = f"latency, {size} B", samples.get(f"dicomm latency {size}", [])
        write = samples[f"ib_write_lat {size}"]
        add(name, ours, median(write), "ib_write_lat", BAR)
        add(f"{name}, peer at its best", ours, min(write), "ib_write_lat", None)
        for tool in ("ib_send_lat", "ib_read_lat"):
            add(name, ours, median(samples[f"{tool} {size}"]), tool, None)
    name = f"bandwidth, {BANDWIDTH_BYTES} B"
    ours = samples.get(f"dicomm bandwidth {BANDWIDTH_BYTES}", [])
    for tool, bar in (("ib_write_bw", BAR), ("ib_read_bw", None)):
        add(name, ours, median(samples[f"{tool} {BANDWIDTH_BYTES}"]), tool, bar)
    return rows


def show(evidence: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = "dicomm over verbs beside perftest"
    table = Table(title=f"{title}, {evidence['rounds']} rounds ({evidence['machine']})")
    for heading in ("what", "unit", "dicomm", "peer", "", "ratio", "bar"):
        table.add_column(heading, justify="left" if heading in ("what", "unit", "") else "right")

    def text(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    for row in evidence["rows"]:
        figures = text(row["ours"]), text(row["peer"])
        table.add_row(
            row["name"],
            row["unit"],
            *figures,
            row["peer_name"],
            text(row["ratio"]),
            text(row["bar"]),
        )
    Console(width=None if sys.stdout.isatty() else 110).print(table)


@app.command(epilog="Examples:  tools/verbs-bench  |  tools/verbs-bench --rounds 9 --json")
def main(
    rounds: Annotated[int, typer.Option(min=1, help="Turns; the rows hold medians.")] = 5,
    peers_only: Annotated[bool, typer.Option(help="Measure perftest alone.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print evidence for machines.")] = False,
) -> None:
    """Latency and bandwidth of dicomm over verbs beside perftest's, in the RDMA machine.

    perftest and dicomm take turns between two rdma_rxe devices of one guest. A ratio above 1 is
    slower than the peer; the bar is 1.25.
    """
    from rich.console import Console
    from rich.progress import Progress

    try:
        if not peers_only and not DICOMM_PERF.exists():
            raise Failed(f"{DICOMM_PERF} is not built: bash tools/setup builds it")
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("measuring", total=rounds)
            samples = measure(rounds, not peers_only, lambda: bar.advance(task))
    except Failed as failure:
        print(f"verbs-bench: {failure}", file=sys.stderr)
        raise typer.Exit(1) from None
    machine = f"RDMA machine on {platform.machine()}, {os.cpu_count()} processor, rdma_rxe"
    rows = make_rows(samples)
    evidence = {"tool": "verbs-bench", "machine": machine, "rounds": rounds, "rows": rows}
    print(json.dumps(evidence, indent=1)) if as_json else show(evidence)


if __name__ == "__main__":
    app()
