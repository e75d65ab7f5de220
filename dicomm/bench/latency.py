"""Point-to-point latency: the rows, tables and demands of `dicomm-bench p2p`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from dicomm.bench.contestants import API_NAMES, GLOO, ours
from dicomm.bench.evidence import Row, cell, row, show_bars, show_machine
from dicomm.bench.options import size_name
from dicomm.bench.rounds import Results
from dicomm.bench.timing import Timing, geometric_mean
from hyperhetero.cli import wide_console

DEFAULT_SIZES = (8, 1 << 10, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
# How much lower than Gloo's, as a geometric mean over the default sizes, over shared memory.
GLOO_BARS = {"c++": 9.94, "python": 7.0, "torch": 3.5}
# C++ API over shared memory, of the best C program at every size; from there on both ends copy.
BEST_BAR, LONG_BYTES, LONG_BAR = 1.05, 1 << 20, 0.8
TORCH_BAR_US = 6.0  # what torch.distributed may add to the C++ API over shared memory
TCP_BAR, TCP_LEAST_BYTES = 1.0, 4 << 10  # C++ API over TCP, of the best peer
PERFTEST_BAR, PERFTEST_SIZES = 1.25, (8, 4 << 10)  # C++ API over verbs

Peers = dict[str, list[str]]


class Latencies:
    """What was measured, asked by transport, API and size."""

    def __init__(self, results: Results, sizes: Sequence[int], apis: Sequence[str], peers: Peers):
        self.results, self.sizes, self.apis, self.peers = results, list(sizes), list(apis), peers

    def timing(self, name: str, size: int) -> Timing | None:
        return self.results.timings.get((name, ("latency", size)))

    def p50_us(self, name: str, size: int) -> float | None:
        return self.results.p50_us(name, ("latency", size))

    def ratio(self, transport: str, api: str, peer: str, size: int) -> float | None:
        """How many times ours the peer's latency is."""
        mine, theirs = self.p50_us(ours(transport, api), size), self.p50_us(peer, size)
        return theirs / mine if mine and theirs else None

    def mean_ratio(self, transport: str, api: str, peer: str) -> float | None:
        ratios = [self.ratio(transport, api, peer, size) for size in self.sizes]
        known = [ratio for ratio in ratios if ratio]
        return geometric_mean(known) if len(known) == len(self.sizes) else None


def rows(found: Latencies) -> list[Row]:
    listed: list[Row] = []
    for transport, peers in found.peers.items():
        for api in found.apis:
            for size in found.sizes:
                listed += _measured(found, transport, api, size, peers)
        listed += _means(found, transport, peers) + _asked(found, transport, peers)
    return listed


def _measured(found: Latencies, transport: str, api: str, size: int, peers: list[str]) -> list[Row]:
    name = f"{transport} {API_NAMES[api]} {size_name(size)}"
    mine = found.timing(ours(transport, api), size)
    if mine is None:
        return [row(name, "us", None)]
    listed = []
    theirs = [(peer, timing) for peer in peers if (timing := found.timing(peer, size))]
    for peer, timing in theirs:
        listed.append(row(name, "us", mine.p50_us, peer=timing.p50_us, peer_name=peer))
    for peer, timing in theirs:
        if timing.p99_us is not None:
            tail = row(f"{name}, p99", "us", mine.p99_us, peer=timing.p99_us, peer_name=peer)
            listed.append(tail)
    return listed or [row(name, "us", mine.p50_us), row(f"{name}, p99", "us", mine.p99_us)]


def _means(found: Latencies, transport: str, peers: list[str]) -> list[Row]:
    listed = []
    for api in found.apis:
        for peer in peers:
            if (mean := found.mean_ratio(transport, api, peer)) is None:
                continue
            bar = None
            if transport == "shm" and peer == GLOO and set(found.sizes) == set(DEFAULT_SIZES):
                bar = GLOO_BARS[api]
            name = f"{transport} {API_NAMES[api]}: {peer} / dicomm, geometric mean"
            listed.append(row(name, "x", mean, peer_name=peer, bar=bar, better="higher"))
    return listed


def _asked(found: Latencies, transport: str, peers: list[str]) -> list[Row]:
    """The demands at single sizes."""
    listed = []
    programs = [peer for peer in peers if peer != GLOO]  # in C, as our C++ API's is one
    for size in found.sizes:
        if transport == "shm" and (best := _best(found, programs, size)):
            bar = LONG_BAR if size >= LONG_BYTES else BEST_BAR
            listed.append(_no_more(found, transport, "c++", best, size, bar))
        if transport == "shm" and {"c++", "torch"} <= set(found.apis):
            listed.append(_more_through_torch(found, transport, size))
        if transport == "tcp" and size >= TCP_LEAST_BYTES and (best := _best(found, peers, size)):
            listed.append(_no_more(found, transport, "c++", best, size, TCP_BAR))
        if transport == "verbs" and "perftest write" in peers and size in PERFTEST_SIZES:
            listed.append(_no_more(found, transport, "c++", "perftest write", size, PERFTEST_BAR))
    if transport == "tcp" and GLOO in peers:
        for api in found.apis:
            short = [size for size in found.sizes if api != "c++" or size < TCP_LEAST_BYTES]
            listed += [_no_more(found, "tcp", api, GLOO, size, 1.0) for size in short]
    return [each for each in listed if each["ours"] is not None]


def _best(found: Latencies, peers: list[str], size: int) -> str | None:
    """The fastest of the peers."""
    timed = {peer: us for peer in peers if (us := found.p50_us(peer, size))}
    return min(timed, key=lambda peer: timed[peer], default=None)


def _more_through_torch(found: Latencies, transport: str, size: int) -> Row:
    torch, plain = (found.p50_us(ours(transport, api), size) for api in ("torch", "c++"))
    more = torch - plain if torch and plain else None
    name = f"{transport} {size_name(size)}: torch.distributed beyond the C++ API"
    return row(name, "us", more, bar=TORCH_BAR_US)


def _no_more(found: Latencies, transport: str, api: str, peer: str, size: int, bar: float) -> Row:
    ratio = found.ratio(transport, api, peer, size)
    name = f"{transport} {API_NAMES[api]} {size_name(size)}: dicomm / {peer}"
    return row(name, "x", 1 / ratio if ratio else None, peer_name=peer, bar=bar)


def show(found: Latencies, result: dict[str, Any]) -> None:
    console = wide_console()
    for transport, peers in found.peers.items():
        console.print(_latency_table(found, transport, peers))
        if peers:
            console.print(_ratio_table(found, transport, peers))
    show_bars(console, result)
    show_machine(console, result)


def _latency_table(found: Latencies, transport: str, peers: list[str]) -> Table:
    names = {ours(transport, api): API_NAMES[api] for api in found.apis}
    names |= {peer: peer.removesuffix(f" {transport}") for peer in peers}
    apis = ", ".join(API_NAMES[api] for api in found.apis)
    table = Table(
        title=f"{transport}: half a round trip in us, median (p99); {apis}: dicomm's APIs"
    )
    for heading in ("message", *names.values()):
        table.add_column(heading, justify="right", no_wrap=True)
    for size in found.sizes:
        table.add_row(size_name(size), *(cell(found.timing(name, size)) for name in names))
    return table


def _ratio_table(found: Latencies, transport: str, peers: list[str]) -> Table:
    # The peers but Gloo are C programs, so they are held against the API that is one.
    pairs = [(api, peer) for peer in peers for api in found.apis if peer == GLOO]
    pairs += [(found.apis[0], peer) for peer in peers if peer != GLOO]
    table = Table(title=f"{transport}: how many times dicomm's latency theirs is")
    table.add_column("message", justify="right")
    for api, peer in pairs:
        heading = f"{peer.removesuffix(f' {transport}')} / {API_NAMES[api]}"
        table.add_column(heading, justify="right")
    for size in found.sizes:
        ratios = [found.ratio(transport, api, peer, size) for api, peer in pairs]
        table.add_row(size_name(size), *(_times(ratio) for ratio in ratios))
    table.add_section()
    means = [found.mean_ratio(transport, api, peer) for api, peer in pairs]
    table.add_row("geometric mean", *(_times(mean) for mean in means))
    return table


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"
