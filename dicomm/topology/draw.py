"""Draws a server: its boxes inside each other, chips above, NICs below, chosen links between."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path as Curve

from dicomm._dicomm import Nic, Topology
from dicomm.pictures import save
from dicomm.topology.choice import Choice
from dicomm.topology.outline import Box, outline, vendor_name

CELL, CHIP_HEIGHT, GAP, TITLE = 1.0, 0.62, 0.14, 0.26  # in units of the drawing
LINKS = 1.5  # the height between chips and NICs, where the links are
ROW_CELLS = 18.0  # wider servers go on in a next row

FILL = {"server": "#ffffff", "NUMA node": "#f3f5f8", "host bridge": "#e6ebf2",
        "switch": "#d5deea", "card at": "#d5deea", "not on PCI": "#f6f6f3"}  # fmt: skip
COLOURS = {
    "same PCIe switch": "#1a9850",
    "same host bridge": "#2b7bba",
    "same NUMA node": "#e08214",
    "across NUMA nodes": "#c51b2d",
    "anywhere": "#7b5ea7",
}


@dataclass
class Placed:
    """Where things are on the drawing; y grows upwards."""

    chips: dict[str, tuple[float, float]] = field(default_factory=dict)  # middle of the lower edge
    nics: dict[str, tuple[float, float]] = field(default_factory=dict)  # middle of the upper edge


def draw(topology: Topology, choices: list[Choice], file: Path) -> None:
    """Writes the picture; its format is the file's suffix."""
    server = outline(topology)
    rows = _rows(server)
    width = max((sum(map(_width, row)) + GAP * (len(row) - 1) for row in rows), default=4.0)
    heights = [max(map(_height, row)) for row in rows]
    height = sum(heights) + 3 * GAP * len(rows) + 0.75

    figure = Figure(figsize=(max(width * 0.95, 6.0), height * 0.95))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set_xlim(-0.25, width + 0.25)
    axes.set_ylim(0, height)
    axes.set_aspect("equal")
    placed = Placed()
    top = height - 0.55
    for row, row_height in zip(rows, heights, strict=True):
        left = (width - sum(map(_width, row)) - GAP * (len(row) - 1)) / 2
        for its in row:
            _draw_box(axes, topology, its, left, top, row_height, placed)
            left += _width(its) + GAP
        top -= row_height + 3 * GAP
    if not rows:
        axes.text(width / 2, height / 2, "no chip and no RDMA NIC", ha="center")
    used = _draw_links(axes, choices, placed)
    axes.text(0, height - 0.3, "Chips (above), NICs (below) and the links chosen",
              fontsize=12, fontweight="bold", va="center")  # fmt: skip
    _draw_legend(axes, used)
    save(figure, file, dpi=160)


def _rows(server: Box) -> list[list[Box]]:
    rows: list[list[Box]] = []
    for its in server.boxes:
        if not rows or sum(map(_width, [*rows[-1], its])) > ROW_CELLS:
            rows.append([])
        rows[-1].append(its)
    return rows


def _own_cells(its: Box) -> int:
    return max(len(its.chips), len(its.nics))


def _width(its: Box) -> float:
    inner = [_own_cells(its) * CELL] if _own_cells(its) else []
    inner += [_width(box) for box in its.boxes]
    return max(sum(inner) + GAP * (len(inner) + 1), 2.0)


def _height(its: Box) -> float:
    inner = max((_height(box) for box in its.boxes), default=0.0)
    return max(inner, 2 * CHIP_HEIGHT + LINKS) + TITLE + 2 * GAP


def _draw_box(
    axes: Axes,
    topology: Topology,
    its: Box,
    left: float,
    top: float,
    height: float,
    placed: Placed,
) -> None:
    """The box with its left upper corner there, and what is in it."""
    _rectangle(axes, left, top - height, _width(its), height, FILL[its.kind], "#9aa7b8")
    weight = "bold" if its.kind == "NUMA node" else "normal"
    axes.text(left + GAP, top - GAP / 2 - TITLE / 2, its.title, fontsize=7.5, va="center",
              color="#405066", fontweight=weight)  # fmt: skip
    inner_top, bottom = top - GAP - TITLE, top - height + GAP
    x = left + GAP
    for number, chip in enumerate(its.chips):
        _draw_chip(axes, topology, chip, x + number * CELL, inner_top - CHIP_HEIGHT, placed)
    for number, nic in enumerate(its.nics):
        _draw_nic(axes, nic, x + number * CELL, bottom, placed)
    if _own_cells(its):
        x += _own_cells(its) * CELL + GAP
    for inner in its.boxes:
        _draw_box(axes, topology, inner, x, inner_top, inner_top - bottom, placed)
        x += _width(inner) + GAP


def _draw_chip(
    axes: Axes, topology: Topology, chip: str, left: float, bottom: float, placed: Placed
) -> None:
    _rectangle(axes, left + 0.06, bottom, CELL - 0.12, CHIP_HEIGHT, "#33475b", "#1f2d3a")
    middle = left + CELL / 2
    axes.text(middle, bottom + 0.4, vendor_name(topology, chip), fontsize=7, color="white",
              ha="center", va="center", fontweight="bold")  # fmt: skip
    axes.text(middle, bottom + 0.18, chip.removeprefix("0000:"), fontsize=6.5, color="#dbe5ef",
              ha="center", va="center")  # fmt: skip
    placed.chips[chip] = (middle, bottom)


def _draw_nic(axes: Axes, nic: Nic, left: float, bottom: float, placed: Placed) -> None:
    fill, ink = ("#fdf3d8", "#5b4708") if nic.active else ("#eeeeee", "#999999")
    _rectangle(axes, left + 0.06, bottom, CELL - 0.12, CHIP_HEIGHT, fill, "#b9a468")
    middle = left + CELL / 2
    rate = f"{nic.bytes_per_s * 8 / 1e9:g} Gb/s" if nic.active and nic.bytes_per_s else nic.state
    axes.text(middle, bottom + 0.4, nic.name, fontsize=6.5 if len(nic.name) < 12 else 5,
              color=ink, ha="center", va="center", fontweight="bold")  # fmt: skip
    axes.text(middle, bottom + 0.18, rate, fontsize=6, color=ink, ha="center", va="center")
    placed.nics[nic.name] = (middle, bottom + CHIP_HEIGHT)


def _draw_links(axes: Axes, choices: list[Choice], placed: Placed) -> list[str]:
    """Returns the classes of nearness that occur, nearest first."""
    used = set()
    for choice in choices:
        for number, (nic, its) in enumerate(zip(choice.nics, choice.distances, strict=True)):
            (x0, y0), (x1, y1) = placed.chips[choice.chip], placed.nics[nic.name]
            bend = (y0 - y1) * 0.5
            curve = Curve(
                [(x0, y0), (x0, y0 - bend), (x1, y1 + bend), (x1, y1)],
                [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4],
            )
            own = number == 0
            axes.add_patch(
                PathPatch(curve, fill=False, edgecolor=COLOURS[its.nearness], capstyle="round",
                          linewidth=2.6 if own else 0.9, alpha=0.95 if own else 0.45,
                          zorder=5 if own else 4)
            )  # fmt: skip
            used.add(its.nearness)
    return [name for name in COLOURS if name in used]


def _draw_legend(axes: Axes, used: list[str]) -> None:
    handles = [Line2D([], [], color=COLOURS[name], linewidth=2.6, label=name) for name in used]
    if handles:
        handles.append(Line2D([], [], color="#333333", linewidth=2.6, label="its own NIC"))
        handles.append(Line2D([], [], color="#333333", linewidth=0.9, label="further rail"))
        axes.legend(handles=handles, loc="lower left", ncols=7, frameon=False, fontsize=7.5,
                    borderaxespad=1.4, borderpad=0)  # fmt: skip


def _rectangle(
    axes: Axes, left: float, bottom: float, width: float, height: float, fill: str, edge: str
) -> None:
    axes.add_patch(
        FancyBboxPatch((left, bottom), width, height, linewidth=0.8, facecolor=fill,
                       edgecolor=edge, boxstyle="round,pad=0,rounding_size=0.07")
    )  # fmt: skip
