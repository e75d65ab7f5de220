"""Timelines: what each rank did, predicted or measured, as a Chrome trace and as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from heteropp.files import FileError, make_folder, write_text

COLOURS = {
    "F": "#4c8ed9",
    "B": "#5aa469",
    "R": "#e8a33d",
    "reduce": "#b06fc4",
    "step": "#d65f5f",
}
WAITING = "#d9d9d9"  # for messages and gathers


@dataclass(frozen=True)
class Span:
    """An action of a rank; seconds from the start of the step."""

    rank: int
    name: str
    micro_batch: int | None
    start_s: float
    end_s: float


def write_chrome_trace(path: Path, timelines: Mapping[str, Sequence[Span]]) -> None:
    """One process a timeline ("predicted", "measured"), one thread a rank, one time axis."""
    events: list[dict] = []
    for process, (name, spans) in enumerate(timelines.items()):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        for rank in sorted({span.rank for span in spans}):
            label = {"name": f"rank {rank}"}
            events.append(
                {"ph": "M", "name": "thread_name", "pid": process, "tid": rank, "args": label}
            )
        for span in spans:
            numbered = "" if span.micro_batch is None else f" {span.micro_batch}"
            events.append(
                {
                    "ph": "X",
                    "name": span.name + numbered,
                    "cat": span.name,
                    "pid": process,
                    "tid": span.rank,
                    "ts": round(span.start_s * 1e6, 3),
                    "dur": round((span.end_s - span.start_s) * 1e6, 3),
                }
            )
    write_text(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def draw_timeline(
    path: Path, timelines: Mapping[str, Sequence[Span]], labels: Sequence[str]
) -> None:
    """One row a rank and timeline; `labels` by rank. Waits and messages are grey.

    Raises FileError.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    rows = len(labels) * len(timelines)
    figure, axes = pyplot.subplots(figsize=(14, 1.6 + 0.42 * rows))
    names, ticks = [], []
    for rank, label in enumerate(labels):
        for order, (name, spans) in enumerate(timelines.items()):
            row = rank * (len(timelines) + 0.4) + order
            names.append(f"{label} {name}" if len(timelines) > 1 else label)
            ticks.append(row)
            for span in spans:
                if span.rank == rank:
                    _draw_span(axes, row, span)
    axes.set_yticks(ticks, names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds from the start of the step")
    axes.set_xlim(0, max(span.end_s for spans in timelines.values() for span in spans))
    meanings = {
        "F": "forward",
        "B": "backward",
        "R": "recompute",
        "step": "step (norm, clip, update)",
    }
    patches = [
        Patch(color=colour, label=meanings.get(name, name)) for name, colour in COLOURS.items()
    ]
    patches.append(Patch(color=WAITING, label="send, receive, gather"))
    axes.legend(handles=patches, ncols=len(patches), loc="lower left", bbox_to_anchor=(0, 1))
    figure.tight_layout()
    make_folder(path.parent)
    try:
        figure.savefig(path, dpi=110, format="png")
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror}") from None
    pyplot.close(figure)


def _draw_span(axes, row: float, span: Span) -> None:
    width = span.end_s - span.start_s
    work = span.name in COLOURS
    axes.broken_barh(
        [(span.start_s, width)],
        (row - 0.4, 0.8),
        color=COLOURS.get(span.name, WAITING),
        edgecolor="white",
        linewidth=0.4,
    )
    if work and span.micro_batch is not None:
        axes.text(
            span.start_s + width / 2,
            row,
            str(span.micro_batch),
            ha="center",
            va="center",
            fontsize=6,
            clip_on=True,
        )
