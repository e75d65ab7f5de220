"""Collectives: the rows and tables of `dicomm-bench collectives`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from dicomm.bench.contestants import API_NAMES, GLOO, ours
from dicomm.bench.evidence import Row, cell, row, show_bars, show_machine
from dicomm.bench.options import size_name
from dicomm.bench.rounds import Case, Results
from hyperhetero.cli import wide_console

APIS = ("c++", "torch")
COLLECTIVES = (
    "allreduce", "broadcast", "reduce", "allgather", "reduce_scatter", "alltoall", "gather",
    "scatter", "barrier",
)  # fmt: skip
# Gloo's time over ours, of allreduce: two ranks have a core each, four share two.
ALLREDUCE_BARS = {(2, 1 << 10): 5.0, (2, 1 << 20): 2.0}
MORE_RANKS_BAR = 1.0


@dataclass(frozen=True)
class Collectives:
    results: Mapping[int, Results]  # by number of ranks
    operations: Sequence[str]
    sizes: Sequence[int]
    transport: str
    peers: Sequence[str]

    def mine(self, api: str) -> str:
        return ours(self.transport, api)

    @property
    def names(self) -> list[str]:
        """The names of all contestants, dicomm's first."""
        return [*(self.mine(api) for api in APIS), *self.peers]

    def cases(self) -> list[Case]:
        return cases(self.operations, self.sizes)

    def ratio(self, ranks: int, api: str, peer: str, case: Case) -> float | None:
        """How many times ours the peer's time is."""
        found = self.results[ranks]
        mine, theirs = found.p50_us(self.mine(api), case), found.p50_us(peer, case)
        return theirs / mine if mine and theirs else None


def cases(operations: Sequence[str], sizes: Sequence[int]) -> list[Case]:
    """A barrier has no size."""
    return [
        (operation, size)
        for operation in operations
        for size in (sizes[:1] if operation == "barrier" else sizes)
    ]


def case_name(case: Case) -> str:
    operation, size = case
    return operation if operation == "barrier" else f"{operation} {size_name(size)}"


def rows(found: Collectives) -> list[Row]:
    listed: list[Row] = []
    for ranks in found.results:
        for api in APIS:
            for case in found.cases():
                listed += _measured(found, ranks, api, case)
    for ranks in found.results:
        listed += _asked(found, ranks)
    return listed


def _measured(found: Collectives, ranks: int, api: str, case: Case) -> list[Row]:
    name = f"{ranks} ranks, {found.transport} {API_NAMES[api]}: {case_name(case)}"
    timings = found.results[ranks].timings
    mine = timings.get((found.mine(api), case))
    if mine is None:
        return []
    listed = []
    theirs = [(peer, timing) for peer in found.peers if (timing := timings.get((peer, case)))]
    for peer, timing in theirs:
        listed.append(row(name, "us", mine.p50_us, peer=timing.p50_us, peer_name=peer))
        tail = row(f"{name}, p99", "us", mine.p99_us, peer=timing.p99_us, peer_name=peer)
        listed.append(tail)
    return listed or [row(name, "us", mine.p50_us), row(f"{name}, p99", "us", mine.p99_us)]


def _asked(found: Collectives, ranks: int) -> list[Row]:
    if found.transport != "shm" or "allreduce" not in found.operations:
        return []
    listed = []
    for api in APIS:
        for size in found.sizes:
            bar = ALLREDUCE_BARS.get((ranks, size)) if ranks == 2 else MORE_RANKS_BAR
            ratio = found.ratio(ranks, api, GLOO, ("allreduce", size))
            if bar and ratio:
                name = (
                    f"{ranks} ranks, {API_NAMES[api]}: allreduce {size_name(size)}: Gloo / dicomm"
                )
                listed.append(row(name, "x", ratio, peer_name=GLOO, bar=bar, better="higher"))
    return listed


def show(found: Collectives, result: dict[str, Any]) -> None:
    console = wide_console()
    for ranks in found.results:
        console.print(_table(found, ranks))
    show_bars(console, result)
    show_machine(console, result)


def _table(found: Collectives, ranks: int) -> Table:
    table = Table(
        title=f"{ranks} ranks, {found.transport}: us a call, median (p99); the size is the whole "
        "group's vector"
    )
    # Gloo is called through torch, MPI from C.
    pairs = [("torch" if peer == GLOO else "c++", peer) for peer in found.peers]
    for heading in ("collective", *found.names):
        table.add_column(heading, justify="right")
    for api, peer in pairs:
        table.add_column(f"{peer} / dicomm {API_NAMES[api]}", justify="right")
    timings = found.results[ranks].timings
    for case in found.cases():
        cells = [cell(timings.get((name, case))) for name in found.names]
        ratios = [found.ratio(ranks, api, peer, case) for api, peer in pairs]
        cells += ["-" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        table.add_row(case_name(case), *cells)
    return table
