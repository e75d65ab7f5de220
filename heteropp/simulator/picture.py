"""A simulated step as one picture: who does what when, how the time divides, and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from heteropp.description.outline import together
from heteropp.description.timeline import COLOURS, draw_rows, drawing, height_of, name_rows, save
from heteropp.simulator.placement import Seat
from heteropp.simulator.simulate import Simulation

MOST_REPLICAS = 32  # beyond, one replica stands for each stage
MOST_CURVES = 8  # beyond, memory is shades
SHARES = {"work": COLOURS["B"], "communication": "#e8a33d", "bubble": "#eeeeee"}


def shown(simulation: Simulation) -> list[int]:
    """Returns the replicas to show: all or, if they are too many, the first of each stage."""
    seats = simulation.program.seats
    if len(seats) <= MOST_REPLICAS:
        return list(range(len(seats)))
    return [a for a, seat in enumerate(seats) if seat.replica == 0]


def label(simulation: Simulation, a: int) -> str:
    """Returns a replica's name, or its stage's name where the replica stands for the stage."""
    seat = simulation.program.seats[a]
    plan = simulation.plan
    stage = plan.pipelines[seat.pipeline].stages[seat.stage]
    where = f"stage {seat.stage}"
    if len(plan.pipelines) > 1:
        where = f"pipeline {seat.pipeline} {where}"
    chip = together(stage.replicas[seat.replica].chips)
    if len(simulation.program.seats) <= MOST_REPLICAS:
        return f"{where} {_ranks(seat)} ({chip})"
    parts = f" x {stage.cp}" if stage.cp > 1 else ""
    return f"{where}: {stage.dp}{parts} x {stage.tp} {chip}"


def draw_simulation(path: Path, simulation: Simulation) -> None:
    """Raises FileError."""
    rows = shown(simulation)
    pyplot = drawing()
    figure, grid = pyplot.subplots(
        2,
        2,
        figsize=(16, height_of(len(rows)) + 3.2),
        width_ratios=(8, 1),
        height_ratios=(height_of(len(rows)), 2.6),
        constrained_layout=True,
    )
    (axes, shares), (memory, corner) = grid
    draw_rows(axes, [(label(simulation, a), simulation.spans_of(a)) for a in rows])
    _draw_shares(shares, simulation, rows, axes)
    _draw_memory(memory, corner, simulation, rows)
    memory.set_xlim(axes.get_xlim())
    plan = simulation.plan
    figure.suptitle(
        f"{plan.model.name}, {plan.schedule}, {plan.world_size} chips: "
        f"a step takes {simulation.step_s:.4g} s, "
        f"{simulation.tokens_per_chip_per_s:.4g} tokens per chip and second, "
        f"bubble {simulation.bubble:.1%}"
    )
    save(figure, path)


def _draw_shares(axes: Any, simulation: Simulation, rows: list[int], beside: Any) -> None:
    low, high = beside.get_ylim()
    places = beside.get_yticks() if len(beside.get_yticks()) == len(rows) else range(len(rows))
    left = [0.0] * len(rows)
    for name, colour in SHARES.items():
        widths = [100 * getattr(simulation.shares[a], name) for a in rows]
        axes.barh(places, widths, left=left, color=colour, height=0.8, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_ylim(low, high)
    axes.set_yticks([])
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the step")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), fontsize=7)


def _draw_memory(axes: Any, corner: Any, simulation: Simulation, rows: list[int]) -> None:
    """Draws each row's memory as a share of its chip's: as curves, or many rows as shades."""
    corner.axis("off")
    axes.set_xlabel("seconds from the start of the step")
    capacity = list(map(simulation.capacity_bytes, rows))
    if len(rows) <= MOST_CURVES:
        for a, size in zip(rows, capacity, strict=True):
            curve = simulation.memory_of(a)
            percent = [100 * held / size for held in curve.bytes]
            axes.step(curve.times_s, percent, where="post", label=label(simulation, a))
        axes.axhline(100, color="#d65f5f", linestyle="--", linewidth=1)
        axes.set_ylabel("% of memory")
        axes.set_ylim(bottom=0)
        corner.legend(*axes.get_legend_handles_labels(), loc="center left", fontsize=7)
        return
    end_s, columns = simulation.timing.ends[0][-1], 800
    image = [
        [100 * curve.at(i * end_s / columns) / size for i in range(columns)]
        for curve, size in zip(map(simulation.memory_of, rows), capacity, strict=True)
    ]
    extent = (0, end_s, len(rows) - 0.5, -0.5)
    shades = axes.imshow(
        image, extent=extent, aspect="auto", cmap="viridis", vmin=0, vmax=max(100, *map(max, image))
    )
    name_rows(
        axes, range(len(rows)), [f"stage {simulation.program.seats[a].stage}" for a in rows], 12
    )
    axes.figure.colorbar(shades, ax=corner, location="left", label="% of memory")


def _ranks(seat: Seat) -> str:
    first, last = seat.ranks[0], seat.ranks[-1]
    if first == last:
        return f"rank {first}"
    if seat.ranks == tuple(range(first, last + 1)):
        return f"ranks {first}-{last}"
    return f"ranks {', '.join(map(str, seat.ranks))}"
