"""dicomm-bench: latency of point-to-point messages, against Gloo, in one run."""

import json
import multiprocessing
import os
import platform
import secrets
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

TRANSPORTS = ("shm", "tcp", "gloo")
DEFAULT_SIZES = "8,1K,4K,64K,1M,16M,64M"
ROUND_S = 0.12  # measured per size, transport and round
ANSWER_S = 60.0
UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


class BadOption(Exception):
    """One sentence for the person who typed it."""


class Link(Protocol):
    def send(self) -> None: ...
    def recv(self) -> None: ...


class DicommLink:
    def __init__(self, communicator: Any, peer: int, length: int) -> None:
        import numpy as np

        self._communicator, self._peer = communicator, peer
        self._out, self._in = np.ones(length, np.uint8), np.zeros(length, np.uint8)

    def send(self) -> None:
        self._communicator.send(self._out, self._peer)

    def recv(self) -> None:
        self._communicator.recv(self._in, self._peer)


class GlooLink:
    def __init__(self, peer: int, length: int) -> None:
        import torch
        import torch.distributed

        self._dist, self._peer = torch.distributed, peer
        self._out = torch.ones(length, dtype=torch.uint8)
        self._in = torch.zeros(length, dtype=torch.uint8)

    def send(self) -> None:
        self._dist.send(self._out, self._peer)

    def recv(self) -> None:
        self._dist.recv(self._in, self._peer)


def _ping_pong(rank: int, link: Link, count: int) -> list[float]:
    """Half round trips in microseconds."""
    times = []
    for _ in range(count):
        start = time.perf_counter_ns()
        if rank == 0:
            link.send()
            link.recv()
        else:
            link.recv()
            link.send()
        times.append((time.perf_counter_ns() - start) / 2000)
    return times


def _serve(rank: int, transport: str, folder: str, secret: str, pipe: Connection) -> None:
    """One end of a pair: answers (length, count) with the times, until told to stop."""
    communicator: Any = None
    if transport == "gloo":
        import torch
        import torch.distributed

        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo", rank=rank, world_size=2, init_method=f"file://{folder}/gloo"
        )
    else:
        import dicomm

        communicator = dicomm.Communicator(
            rank,
            2,
            dicomm.FileStore(f"{folder}/{transport}"),
            secret=secret,
            transport=transport,
            timeout_s=ANSWER_S,
            listen_address="127.0.0.1",
        )
    links: dict[int, Link] = {}
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        length, count = order
        if length not in links:
            links.clear()
            links[length] = (
                DicommLink(communicator, 1 - rank, length)
                if communicator
                else GlooLink(1 - rank, length)
            )
        pipe.send(_ping_pong(rank, links[length], count))
    if communicator:
        communicator.close()
    else:
        torch.distributed.destroy_process_group()


class Pair:
    """Two processes that exchange messages over one transport."""

    def __init__(self, transport: str, folder: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.transport = transport
        self._pipes, self._processes = [], []
        secret = secrets.token_hex(16)
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, transport, folder, secret, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _answer(self, rank: int) -> Any:
        try:
            if self._pipes[rank].poll(ANSWER_S):
                return self._pipes[rank].recv()
        except EOFError:
            raise RuntimeError(f"a {self.transport} process ended early") from None
        raise RuntimeError(f"the {self.transport} pair gave no answer within {ANSWER_S:.0f} s")

    def wait_ready(self) -> None:
        for rank in range(2):
            self._answer(rank)

    def measure(self, length: int, count: int) -> list[float]:
        for pipe in self._pipes:
            pipe.send((length, count))
        times = [self._answer(rank) for rank in range(2)]
        return times[0]

    def close(self) -> None:
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except OSError:
                continue
        for process in self._processes:
            process.join(5)
            process.kill()
            process.join()


def measure(
    sizes: list[int], transports: list[str], repeats: int, progress: bool
) -> dict[tuple[str, int], float]:
    """Median half round trip in us by (transport, bytes). Rounds interleave the transports, so
    that whatever else the machine does falls on all of them."""
    from rich.console import Console
    from rich.progress import Progress

    samples: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="dicomm-bench-") as folder:
        pairs = [Pair(transport, folder) for transport in transports]
        try:
            for pair in pairs:
                pair.wait_ready()
            with Progress(console=Console(stderr=True), disable=not progress) as bar:
                task = bar.add_task("measuring", total=len(sizes) * repeats * len(pairs))
                for length in sizes:
                    counts = {}
                    for pair in pairs:  # warms up, and tells how many fit into a round
                        warm = statistics.median(pair.measure(length, 5))
                        counts[pair.transport] = max(3, min(5000, int(ROUND_S * 5e5 / warm)))
                    for _ in range(repeats):
                        for pair in pairs:
                            times = pair.measure(length, counts[pair.transport])
                            samples.setdefault((pair.transport, length), []).extend(times)
                            bar.advance(task)
        finally:
            for pair in pairs:
                pair.close()
    return {key: statistics.median(times) for key, times in samples.items()}


def size_name(length: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if length >= scale and length % scale == 0:
            return f"{length // scale} {unit}"
    return f"{length} B"


def evidence(medians: dict[tuple[str, int], float]) -> dict[str, Any]:
    rows = []
    for (transport, length), ours in medians.items():
        if transport == "gloo":
            continue
        peer = medians.get(("gloo", length))
        rows.append(
            {
                "name": f"{transport} {size_name(length)}",
                "unit": "us",
                "ours": round(ours, 3),
                "peer": None if peer is None else round(peer, 3),
                "peer_name": "Gloo (torch.distributed send/recv)",
                "ratio": None if peer is None else round(ours / peer, 4),
                "bar": None,
                "better": "lower",
            }
        )
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return {"tool": "dicomm-bench p2p", "machine": machine, "rows": rows}


def parse_sizes(text: str) -> list[int]:
    sizes = []
    for word in text.split(","):
        number = word.strip().upper().removesuffix("IB").removesuffix("B")
        unit = number[-1:] if number[-1:] in "KMG" else ""
        digits = number.removesuffix(unit) if unit else number
        if not digits.isdecimal() or not 1 <= int(digits) * UNITS[unit] <= 1 << 30:
            raise BadOption(
                f"--sizes: '{word.strip()}' is not a size between 1 and 1G bytes, like 8, 4K or 64M"
            )
        sizes.append(int(digits) * UNITS[unit])
    return sorted(set(sizes))


def parse_transports(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in TRANSPORTS:
            raise BadOption(f"--transports: '{word}' is not one of {', '.join(TRANSPORTS)}")
    if set(words) == {"gloo"}:
        raise BadOption("--transports: name shm or tcp too, gloo is only the peer")
    return [transport for transport in TRANSPORTS if transport in words]


def show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Half round trip, median ({result['machine']})")
    for heading in ("message", "dicomm, us", "Gloo, us", "dicomm / Gloo"):
        table.add_column(heading, justify="right")
    for row in result["rows"]:
        peer = ("-", "-") if row["peer"] is None else (f"{row['peer']:.2f}", f"{row['ratio']:.3f}")
        table.add_row(row["name"], f"{row['ours']:.2f}", *peer)
    Console().print(table)


def draw(medians: dict[tuple[str, int], float], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for transport in TRANSPORTS:
        points = sorted((n, t) for (name, n), t in medians.items() if name == transport)
        if points:
            axes.loglog(*zip(*points, strict=True), "o-", label=transport)
    axes.set(xlabel="message (bytes)", ylabel="half round trip (us)")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


@app.callback()
def _commands() -> None:
    """Latency of dicomm's transports."""


@app.command(
    epilog="Examples:  dicomm-bench p2p   |   dicomm-bench p2p --sizes 8,64K,1M --transports "
    "shm,gloo --json   |   dicomm-bench p2p --plot p2p.png"
)
def p2p(
    sizes: Annotated[str, typer.Option(help="Message sizes, such as 8,4K,64M.")] = DEFAULT_SIZES,
    transports: Annotated[str, typer.Option(help="Of shm, tcp, gloo.")] = ",".join(TRANSPORTS),
    repeats: Annotated[int, typer.Option(help="Interleaved rounds, 1 to 1000.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the result: a .png or .svg file.")] = None,
) -> None:
    """Half-round-trip latency between two processes of this machine, side by side with Gloo."""
    try:
        lengths, names = parse_sizes(sizes), parse_transports(transports)
        if not 1 <= repeats <= 1000:
            raise BadOption(f"--repeats: {repeats} is not between 1 and 1000")
        if plot and plot.suffix not in (".png", ".svg"):
            raise BadOption(f"--plot: '{plot}' is not a .png or .svg file")
        if plot and not plot.absolute().parent.is_dir():
            raise BadOption(f"--plot: there is no folder {plot.absolute().parent}")
    except BadOption as error:
        typer.echo(f"dicomm-bench: {error}", err=True)
        raise typer.Exit(2) from None
    try:
        medians = measure(lengths, names, repeats, progress=sys.stderr.isatty())
    except RuntimeError as error:
        typer.echo(f"dicomm-bench: {error}", err=True)
        raise typer.Exit(1) from None
    result = evidence(medians)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        show(result)
    if plot:
        draw(medians, plot)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
