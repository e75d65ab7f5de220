"""What protecting messages over TCP costs: the rows and the table of `dicomm-bench security`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.table import Table

from dicomm.bench import cpp
from dicomm.bench.evidence import Row, cell, row, show_bars, show_machine
from dicomm.bench.options import size_name
from dicomm.bench.rounds import Entry, Results
from hyperhetero.cli import wide_console

PLAIN = "none"
# of what plain messages take, from so many bytes on
BARS = {"integrity": 1.25, "encryption": 1.6}
BAR_LEAST_BYTES = 1 << 20


def entries(folder: str) -> list[Entry]:
    secret = secrets.token_hex(16)

    def entry(setting: str) -> Entry:
        environment = {"DICOMM_SECURITY": setting}
        place = f"{folder}/{setting}"
        name = ours(setting)
        return name, partial(cpp.CppApi, name, "tcp", place, secret, (), environment)

    return [entry(setting) for setting in (PLAIN, *BARS)]


def ours(setting: str) -> str:
    return f"dicomm {setting}"


def rows(found: Results, sizes: Sequence[int]) -> list[Row]:
    listed = []
    for size in sizes:
        plain_us = found.p50_us(ours(PLAIN), ("latency", size))
        for setting, bar in BARS.items():
            ours_us = found.p50_us(ours(setting), ("latency", size))
            name = f"tcp C++ {size_name(size)}, {setting}"
            listed.append(row(name, "us", ours_us, peer=plain_us, peer_name="unprotected"))
            if size >= BAR_LEAST_BYTES and ours_us and plain_us:
                price = f"{name} / unprotected"
                listed.append(row(price, "x", ours_us / plain_us, bar=bar))
    return listed


def show(found: Results, sizes: Sequence[int], result: dict[str, Any]) -> None:
    console = wide_console()
    table = Table(title="tcp: half a round trip in us, median (p99), by DICOMM_SECURITY")
    for heading in ("message", PLAIN, *BARS):
        table.add_column(heading, justify="right", no_wrap=True)
    for size in sizes:
        timings = (found.timings.get((ours(each), ("latency", size))) for each in (PLAIN, *BARS))
        table.add_row(size_name(size), *map(cell, timings))
    console.print(table)
    show_bars(console, result)
    show_machine(console, result)
