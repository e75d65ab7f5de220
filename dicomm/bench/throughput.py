"""Bandwidth and message rate: the rows and tables of `dicomm-bench bandwidth` and `rate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from dicomm.bench.contestants import API_NAMES, ours
from dicomm.bench.evidence import Row, row, show_bars, show_machine
from dicomm.bench.options import size_name
from dicomm.bench.rounds import Results
from dicomm.bench.timing import WINDOW, window_of
from hyperhetero.cli import wide_console

DIRECTIONS = {"uni": "one way", "bi": "both ways"}
PERFTEST_BAR, PERFTEST_SIZE = 1.25, 1 << 20  # C++ API over verbs, one way


@dataclass(frozen=True)
class Throughput:
    """The throughput of every contestant, in `unit`: GB/s (1e9 bytes a second) or messages/s."""

    results: Results
    sizes: Sequence[int]
    kinds: Sequence[str]  # of "uni" and "bi"
    apis: Sequence[str]
    peers: dict[str, list[str]]
    unit: str

    def of(self, name: str, kind: str, size: int, tail: bool = False) -> float | None:
        """Returns a contestant's throughput in the window of median time, or None if not measured.

        tail: in the window at the 99th percentile of the times instead.
        """
        timing = self.results.timings.get((name, (kind, size)))
        window_us = (timing.p99_us if tail else timing.p50_us) if timing else None
        if not window_us:
            return None
        messages = window_of(size) * (2 if kind == "bi" else 1)
        per_s = messages / (window_us * 1e-6)
        return per_s * size / 1e9 if self.unit == "GB/s" else per_s


def rows(found: Throughput) -> list[Row]:
    listed: list[Row] = []
    for transport, peers in found.peers.items():
        for api in found.apis:
            for kind in found.kinds:
                for size in found.sizes:
                    listed += _measured(found, transport, api, kind, size, peers)
        listed += _asked(found, transport, peers)
    return listed


def _measured(
    found: Throughput, transport: str, api: str, kind: str, size: int, peers: list[str]
) -> list[Row]:
    name = f"{transport} {API_NAMES[api]} {size_name(size)} {DIRECTIONS[kind]}"
    mine = ours(transport, api)
    listed = []
    for tail in (False, True):
        label = f"{name}, slowest in 100" if tail else name
        value = found.of(mine, kind, size, tail)
        beside = [(peer, theirs) for peer in peers if (theirs := found.of(peer, kind, size, tail))]
        for peer, theirs in beside:
            listed.append(
                row(label, found.unit, value, peer=theirs, peer_name=peer, better="higher")
            )
        if not beside:
            listed.append(row(label, found.unit, value, better="higher"))
    return listed


def _asked(found: Throughput, transport: str, peers: list[str]) -> list[Row]:
    peer = "perftest write"
    if found.unit != "GB/s" or transport != "verbs" or peer not in peers:
        return []
    mine = found.of(ours("verbs", "c++"), "uni", PERFTEST_SIZE)
    theirs = found.of(peer, "uni", PERFTEST_SIZE)
    if not mine or not theirs:
        return []
    name = f"verbs C++ {size_name(PERFTEST_SIZE)}: {peer} / dicomm"
    return [row(name, "x", theirs / mine, peer_name=peer, bar=PERFTEST_BAR)]


def show(found: Throughput, result: dict[str, Any]) -> None:
    console = wide_console()
    for transport, peers in found.peers.items():
        for kind in found.kinds:
            console.print(_table(found, transport, kind, peers))
    show_bars(console, result)
    show_machine(console, result)


def _table(found: Throughput, transport: str, kind: str, peers: list[str]) -> Table:
    names = {ours(transport, api): API_NAMES[api] for api in found.apis}
    names |= {peer: peer.removesuffix(f" {transport}") for peer in peers}
    apis = ", ".join(API_NAMES[api] for api in found.apis)
    table = Table(
        title=f"{transport}, {DIRECTIONS[kind]}: {found.unit}, up to {WINDOW} messages in flight; "
        f"{apis}: dicomm's APIs"
    )
    for heading in ("message", *names.values()):
        table.add_column(heading, justify="right")
    for size in found.sizes:
        values = [found.of(name, kind, size) for name in names]
        cells = ["-" if v is None else f"{v:,.2f}" if v < 1000 else f"{v:,.0f}" for v in values]
        table.add_row(size_name(size), *cells)
    return table
