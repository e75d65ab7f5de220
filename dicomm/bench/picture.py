"""Pictures like the H2 paper's figure 7: latency by message size, and how many times ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dicomm.bench.contestants import API_NAMES, GLOO, ours
from dicomm.bench.group import Collectives, case_name
from dicomm.bench.latency import Latencies
from dicomm.bench.options import size_name
from dicomm.bench.strategies import PAPER_RATIOS, STRATEGIES, Strategies
from dicomm.bench.throughput import DIRECTIONS, Throughput
from dicomm.pictures import save

Line = tuple[str, str, str, str]  # contestant, label, colour, style

_COLOURS = {"c++": "#0b5394", "python": "#3d85c6", "torch": "#9fc5e8"}
_PEER_COLOURS = ("#cc4125", "#e69138", "#6aa84f", "#8e7cc3", "#999999")


def latencies(found: Latencies, machine: str, path: Path) -> None:
    """Above, each transport's latencies; below, its ratios to Gloo."""
    transports = list(found.peers)
    figure = Figure(figsize=(6.2 * len(transports), 7.5), layout="constrained")
    grid = figure.subplots(2, len(transports), squeeze=False, height_ratios=(3, 2))
    for column, transport in enumerate(transports):
        _curves(grid[0][column], found, transport)
        _ratios(grid[1][column], found, transport)
    _save(figure, machine, path)


def throughputs(found: Throughput, machine: str, path: Path) -> None:
    transports = list(found.peers)
    shape = (len(found.kinds), len(transports))
    figure = Figure(figsize=(6.2 * shape[1], 4 * shape[0]), layout="constrained")
    grid = figure.subplots(*shape, squeeze=False)
    for line, kind in enumerate(found.kinds):
        for column, transport in enumerate(transports):
            axes = grid[line][column]
            for name, label, colour, style in _lines(found.apis, transport, found.peers[transport]):
                points = [(size, v) for size in found.sizes if (v := found.of(name, kind, size))]
                _curve(axes, points, label, colour, style)
            axes.set(title=f"{transport}, {DIRECTIONS[kind]}", ylabel=found.unit)
            _finish(axes, found.sizes)
    _save(figure, machine, path)


def collectives(found: Collectives, machine: str, path: Path) -> None:
    figure = Figure(figsize=(11, 3.6 * len(found.results)), layout="constrained")
    grid = figure.subplots(len(found.results), squeeze=False)
    cases = found.cases()
    colours = {found.mine(api): colour for api, colour in _COLOURS.items()}
    colours |= dict(zip(found.peers, _PEER_COLOURS, strict=False))
    known = {name for results in found.results.values() for name in results.names()}
    names = [name for name in found.names if name in known]
    width = 0.8 / len(names)
    for (axes,), (ranks, results) in zip(grid, found.results.items(), strict=True):
        for index, name in enumerate(names):
            places = [i + (index + 0.5) * width - 0.4 for i in range(len(cases))]
            heights = [results.p50_us(name, case) or 0.0 for case in cases]
            axes.bar(places, heights, width, label=name, color=colours[name])
        axes.set(title=f"{ranks} ranks", ylabel="us a call", yscale="log")
        axes.set_xticks(range(len(cases)), [case_name(case) for case in cases], rotation=75)
        axes.tick_params(axis="x", labelsize=7)
        axes.legend(fontsize=8)
    _save(figure, machine, path)


def strategies(found: Strategies, machine: str, path: Path) -> None:
    """Latencies as curves and their ratio as bars, as in the paper's figure."""
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    beside = axes.twinx()
    places = range(len(found.sizes))
    ratios = [found.ratio(size) for size in found.sizes]
    beside.bar(places, ratios, 0.6, color="#cfe2f3", zorder=0)
    for place, ratio in zip(places, ratios, strict=True):
        beside.text(place, 0.1, f"{ratio:.1f}x", ha="center", fontsize=8, color="#0b5394")
    beside.set(ylabel="CPU-mediated / device-direct", ylim=(0, 2 * max(ratios)))
    for strategy, colour in zip(STRATEGIES, ("#0b5394", "#cc4125"), strict=True):
        times = [found.times_us[strategy, size] for size in found.sizes]
        axes.plot(places, times, "o-", color=colour, label=strategy, markersize=4)
    axes.set(yscale="log", xlabel="message", ylabel="half a round trip (us, chips' clocks)")
    a, b = found.world.chips
    axes.set_title(
        f"chip {a.name} to chip {b.name}: mean ratio {sum(ratios) / len(ratios):.2f} "
        f"(the paper's: {PAPER_RATIOS['mean']})"
    )
    axes.set_xticks(places, [size_name(size) for size in found.sizes], rotation=30)
    axes.set_zorder(beside.get_zorder() + 1)  # the curves in front of the bars
    axes.patch.set_visible(False)
    axes.legend(fontsize=8, loc="upper left")
    _save(figure, machine, path)


def _curves(axes: Axes, found: Latencies, transport: str) -> None:
    for name, label, colour, style in _lines(found.apis, transport, found.peers[transport]):
        points = [(size, t) for size in found.sizes if (t := found.p50_us(name, size))]
        _curve(axes, points, label, colour, style)
    axes.set(title=transport, ylabel="half a round trip (us)")
    _finish(axes, found.sizes)


def _lines(apis: Sequence[str], transport: str, peers: Sequence[str]) -> list[Line]:
    lines = [
        (ours(transport, api), f"dicomm {API_NAMES[api]}", _COLOURS[api], "o-") for api in apis
    ]
    for peer, colour in zip(peers, _PEER_COLOURS, strict=False):
        lines.append((peer, peer, colour, "s--"))
    return lines


def _curve(
    axes: Axes, points: Sequence[tuple[int, float]], label: str, colour: str, style: str
) -> None:
    if points:
        axes.loglog(*zip(*points, strict=True), style, color=colour, label=label, markersize=4)


def _finish(axes: Axes, sizes: Sequence[int]) -> None:
    axes.set_xticks(sizes, [size_name(size) for size in sizes], rotation=30)
    axes.minorticks_off()
    axes.grid(True, alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)


def _save(figure: Figure, machine: str, path: Path) -> None:
    figure.supxlabel(machine, fontsize=7, color="#666666")
    save(figure, path, dpi=150)


def _ratios(axes: Axes, found: Latencies, transport: str) -> None:
    apis = [api for api in found.apis if found.mean_ratio(transport, api, GLOO)]
    width = 0.8 / max(len(apis), 1)
    for index, api in enumerate(apis):
        ratios = [found.ratio(transport, api, GLOO, size) or 0.0 for size in found.sizes]
        places = [i + (index + 0.5) * width - 0.4 for i in range(len(ratios))]
        mean = found.mean_ratio(transport, api, GLOO)
        label = API_NAMES[api] + (f", mean {mean:.1f}x" if mean else "")
        bars = axes.bar(places, ratios, width, color=_COLOURS[api], label=label)
        axes.bar_label(bars, fmt="%.1f", fontsize=6)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(found.sizes)), [size_name(size) for size in found.sizes], rotation=30)
    axes.set(ylabel="Gloo / dicomm", xlabel="message")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
