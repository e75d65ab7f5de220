"""Timelines: what each rank did, predicted or measured, and their picture."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heteropp.description.files import write_bytes

COLOURS = {
    "F": "#4c8ed9",
    "R": "#e8a33d",
    "B": "#5aa469",
    "I": "#2f7d4f",
    "W": "#98cf8f",
    "reduce": "#b06fc4",
    "step": "#d65f5f",
}
MEANINGS = {
    "F": "forward",
    "R": "recompute",
    "B": "backward",
    "I": "backward: input",
    "W": "backward: weights",
    "step": "step (norm, clip, update)",
}
WAITING = "#d9d9d9"  # for messages and gathers
LATER_MINISTAGE = 0.65  # how strong their colours are
MOST_BARS = 4000  # beyond, a picture shows how much of each moment is what
MOST_NAMES = 40  # of rows


@dataclass(frozen=True)
class Span:
    """An action of a rank; seconds from the start of the step."""

    rank: int
    name: str
    micro_batch: int | None
    start_s: float
    end_s: float
    ministage: int = 0  # of its stage


def in_words(micro_batch: int, slices: int) -> str:
    """Returns an action's micro-batch, and which slice of it where there are several."""
    if slices == 1:
        return str(micro_batch)
    whole, index = divmod(micro_batch, slices)
    return f"{whole}, slice {index}"


Row = tuple[str, Sequence[Span]]  # what it is called


def draw_timeline(
    path: Path, timelines: Mapping[str, Sequence[Span]], labels: Sequence[str]
) -> None:
    """One row a rank and timeline; `labels` by rank. Waits and messages are grey.

    Raises FileError.
    """
    rows: list[Row] = []
    for rank, label in enumerate(labels):
        for name, spans in timelines.items():
            own = [span for span in spans if span.rank == rank]
            rows.append((f"{label} {name}" if len(timelines) > 1 else label, own))
    pyplot = drawing()
    figure, axes = pyplot.subplots(figsize=(14, height_of(len(rows))))
    draw_rows(axes, rows, len(timelines))
    save(figure, path)


def drawing() -> Any:
    """matplotlib's pyplot, without a screen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def height_of(rows: int) -> float:
    """Returns the height of a picture in inches."""
    return 1.6 + min(0.42 * rows, 10)


def save(figure: Any, path: Path) -> None:
    """Writes a PNG file. Raises FileError."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format="png", bbox_inches="tight")
    drawing().close(figure)
    write_bytes(path, picture.getvalue())


def draw_rows(axes: Any, rows: Sequence[Row], together: int = 1) -> None:
    """Every action as a bar, or, of very many, how much of each moment is what.

    Every `together` rows stand close to one another.
    """
    from matplotlib.patches import Patch

    spans = [span for _, own in rows for span in own]
    end_s = max(span.end_s for span in spans)
    if len(spans) <= MOST_BARS:
        places = [i // together * (together + 0.4) + i % together for i in range(len(rows))]
        for place, (_, own) in zip(places, rows, strict=True):
            _draw_bars(axes, place, own, end_s)
        axes.invert_yaxis()
    else:
        places = [float(i) for i in range(len(rows))]
        extent = (0, end_s, len(rows) - 0.5, -0.5)
        picture = shades([own for _, own in rows], end_s)
        axes.imshow(picture, extent=extent, aspect="auto", interpolation="nearest")
    name_rows(axes, places, [name for name, _ in rows])
    axes.set_xlabel("seconds from the start of the step")
    axes.set_xlim(0, end_s)
    shown = {span.name for span in spans}
    patches = [
        Patch(color=colour, label=MEANINGS.get(name, name))
        for name, colour in COLOURS.items()
        if name in shown
    ]
    patches.append(Patch(color=WAITING, label="send, receive, gather"))
    axes.legend(handles=patches, ncols=len(patches), loc="lower left", bbox_to_anchor=(0, 1))


def name_rows(
    axes: Any, places: Sequence[float], names: Sequence[str], most: int = MOST_NAMES
) -> None:
    """Labels the rows at `places`, at even distances and at most `most` of them."""
    every = -(-len(names) // most)
    axes.set_yticks(places[::every], names[::every], fontsize=8)


def shades(rows: Sequence[Sequence[Span]], end_s: float, columns: int = 1600) -> Any:
    """An image [rows, columns, 3] whose pixels mix the colours of what goes on; white is idle."""
    import numpy
    from matplotlib.colors import to_rgb

    image = numpy.ones((len(rows), columns, 3))
    for row, spans in enumerate(rows):
        by_name: dict[str, list[Span]] = {}
        for span in spans:
            by_name.setdefault(span.name, []).append(span)
        for name, same in by_name.items():
            # the share of each pixel that the spans fill: differences of how much came before
            edges = numpy.array(sorted((s.start_s, s.end_s) for s in same)) / end_s * columns
            filled = numpy.zeros(edges.shape)
            filled[:, 1] = numpy.cumsum(edges[:, 1] - edges[:, 0])
            filled[1:, 0] = filled[:-1, 1]
            reach = numpy.interp(numpy.arange(columns + 1), edges.ravel(), filled.ravel())
            share = numpy.clip(numpy.diff(reach), 0, 1)[:, None]
            colour = numpy.array(to_rgb(COLOURS.get(name, WAITING)))
            image[row] -= share * (1 - colour)
    return numpy.clip(image, 0, 1)


def _draw_bars(axes: Any, row: float, spans: Sequence[Span], end_s: float) -> None:
    for span in sorted(spans, key=lambda span: span.name != "reduce"):  # work is drawn over it
        width = span.end_s - span.start_s
        colour = COLOURS.get(span.name, WAITING)
        axes.broken_barh(
            [(span.start_s, width)],
            (row - 0.4, 0.8),
            color=colour,
            alpha=LATER_MINISTAGE if span.ministage else 1,
            edgecolor="white",
            linewidth=0.4,
        )
        if span.name in COLOURS and span.micro_batch is not None and width > end_s / 150:
            axes.text(
                span.start_s + width / 2,
                row,
                str(span.micro_batch),
                ha="center",
                va="center",
                fontsize=6,
                clip_on=True,
            )
