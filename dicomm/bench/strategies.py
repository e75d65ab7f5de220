"""Device-direct against CPU-mediated: the H2 paper's figure 7, on emulated chips and NICs.

Two real processes, each an emulated chip, play ping-pong through torch.distributed's backend
dicomm with both strategies; times are the emulated chips' own. What makes the CPU-mediated path
slower: a copy to the host (the chip file's launch_s and host_bytes_per_s), the hosts' TCP/IP
(tcp.toml), and a copy to the other chip. Device-direct meets the NICs alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dicomm.bench.chip_ranks import ChipSetup
from dicomm.bench.chips import ChipFile, ChipLink
from dicomm.bench.evidence import Row, row, show_machine
from dicomm.bench.options import size_name
from dicomm.bench.quiet import Quiet, Watch, worst
from dicomm.bench.team import Team
from dicomm.bench.timing import Order
from hyperhetero.cli import wide_console
from hyperhetero.progress import Progress

STRATEGIES = ("device-direct", "cpu-mediated")
PAPER = "H2 paper, section 3.2.1 (its chips and network)"
PAPER_RATIOS = {"least": 1.79, "mean": 9.94, "greatest": 16.0}
LEAST_FIDELITY = 0.9
# Beside a longer message's own time the host's work weighs little, and slowed it would take long.
LONG_BYTES, LONG_SHARE = 1 << 20, 0.1


@dataclass(frozen=True)
class World:
    """Two chips on different nodes, and what lies between."""

    chips: tuple[ChipFile, ChipFile]
    tcp: ChipLink

    @property
    def nic(self) -> ChipLink:
        a, b = (chip.nic for chip in self.chips)
        return ChipLink(max(a.latency_s, b.latency_s), min(a.bytes_per_s, b.bytes_per_s))

    @property
    def links(self) -> dict[str, ChipLink]:
        return {"device-direct": self.nic, "cpu-mediated": self.tcp}

    def sum_of_parts_us(self, strategy: str, size: int) -> float:
        """What a message in one piece takes if no host is ever late. (A long CPU-mediated one takes
        less where its copies and the network overlap.)"""
        copies_us = sum(chip.host.us(size) for chip in self.chips)
        return self.links[strategy].us(size) + (copies_us if strategy == "cpu-mediated" else 0)


@dataclass(frozen=True)
class Strategies:
    """times_us: by strategy and size, in the chips' own time: slow motion is taken out."""

    world: World
    sizes: Sequence[int]
    times_us: dict[tuple[str, int], float]
    slow_motion: float
    quiet: Quiet | None

    def ratio(self, size: int) -> float:
        return self.times_us["cpu-mediated", size] / self.times_us["device-direct", size]

    def fidelity(self, size: int) -> float:
        """The share of the time that is the chips' and links', and not a late host's."""
        return min(
            min(1.0, self.world.sum_of_parts_us(strategy, size) / self.times_us[strategy, size])
            for strategy in STRATEGIES
        )


def measure(
    world: World,
    sizes: Sequence[int],
    slow_motion: float,
    repeats: int,
    folder: str,
) -> Strategies:
    """Messages over LONG_BYTES in LONG_SHARE of the slow motion. Raises Failed."""
    short = [size for size in sizes if size <= LONG_BYTES]
    long = [size for size in sizes if size > LONG_BYTES]
    times_us: dict[tuple[str, int], float] = {}
    quiets = []
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("measuring", total=len(sizes) * repeats * len(STRATEGIES))
        for part, factor in ((short, slow_motion), (long, max(1.0, slow_motion * LONG_SHARE))):
            if part:
                own_folder = Path(folder, f"{factor:g}")
                own_folder.mkdir()
                found, quiet = _play(
                    world, part, factor, repeats, own_folder, partial(bar.advance, task)
                )
                times_us |= found
                quiets.append(quiet)
    return Strategies(world, sizes, times_us, slow_motion, worst(quiets))


def _play(
    world: World,
    sizes: Sequence[int],
    factor: float,
    repeats: int,
    folder: Path,
    advance: Callable[[], None],
) -> tuple[dict[tuple[str, int], float], Quiet]:
    """The least over rounds in which the strategies take turns: a late host only ever adds."""
    paths = []
    for rank, chip in enumerate(world.chips):
        path = folder / f"rank-{rank}.toml"
        path.write_text(chip.slowed(factor))
        paths.append(str(path))
    links = {name: link.slowed(factor) for name, link in world.links.items()}
    team = Team("chips", ChipSetup((paths[0], paths[1]), links, str(folder)), start="spawn")
    times_us: dict[tuple[str, int], float] = {}
    try:
        team.wait_ready()
        watch = Watch()
        for size in sizes:
            for strategy in STRATEGIES * repeats:
                time_us = team.measure(Order(strategy, size, 1, 1)).p50_us / factor
                times_us[strategy, size] = min(time_us, times_us.get((strategy, size), time_us))
                advance()
                watch.spin()
        return times_us, watch.result()
    finally:
        team.close()


def rows(found: Strategies) -> list[Row]:
    listed = []
    for size in found.sizes:
        direct, mediated = (found.times_us[strategy, size] for strategy in STRATEGIES)
        name = f"{size_name(size)}, device-direct"
        listed.append(row(name, "us", direct, peer=mediated, peer_name="CPU-mediated TCP"))
    ratios = [found.ratio(size) for size in found.sizes]
    for size, ratio in zip(found.sizes, ratios, strict=True):
        name = f"{size_name(size)}: CPU-mediated / device-direct"
        listed.append(row(name, "x", ratio, better="higher"))
    summary = {"least": min(ratios), "mean": statistics.mean(ratios), "greatest": max(ratios)}
    for name, value in summary.items():
        label = f"{name} ratio: CPU-mediated / device-direct"
        paper = PAPER_RATIOS[name]
        listed.append(row(label, "x", value, peer=paper, peer_name=PAPER, better="higher"))
    fidelity = min(found.fidelity(size) for size in found.sizes)
    listed.append(row("pacing fidelity, of the worst size", "", fidelity, better="higher"))
    return listed


def show(found: Strategies, result: dict[str, Any]) -> None:
    console = wide_console()
    a, b = found.world.chips
    table = Table(
        title=f"chip {a.name} to chip {b.name}, half a round trip in us by the chips' clocks "
        f"(slow motion {found.slow_motion:g})"
    )
    for heading in ("message", "device-direct", "CPU-mediated", "ratio", "fidelity"):
        table.add_column(heading, justify="right")
    for size in found.sizes:
        times = [f"{found.times_us[strategy, size]:,.2f}" for strategy in STRATEGIES]
        cells = (f"{found.ratio(size):.2f}", f"{found.fidelity(size):.3f}")
        table.add_row(size_name(size), *times, *cells)
    console.print(table)
    for each in result["rows"]:
        if each["peer_name"] == PAPER:
            line = f"{each['name']}: {each['ours']:.2f}; {PAPER}: {each['peer']:g}"
            console.print(line, highlight=False)
    if min(found.fidelity(size) for size in found.sizes) < LEAST_FIDELITY:
        console.print(
            "A fidelity is low: the host was late. Do not quote these figures; give it more time "
            "with --slow-motion."
        )
    show_machine(console, result, emulated=True)
