"""The timelines of trace.json as the page draws them: rows of spans, and arrows between them."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from heteropp.description.files import FileError
from heteropp.description.timeline import COLOURS, MEANINGS, WAITING

MOST_ROWS = 48
MOST_BYTES = 1 << 30
NAME = re.compile(r"([^\s,]+)(?: (\d+))?(?:, slice \d+)?(?:, ministage (\d+))?")

Track = tuple[int, int]  # process and thread of the trace


def read_trace(path: Path, plan: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns the timelines, ready for JSON; None where there is no trace. Raises FileError.

    Times are in microseconds from the start of the step. A span is [kind, micro-batch or -1,
    ministage, begin, duration], of which the kind is an index into `kinds`. An arrow is [timeline,
    row, span, row, span], from one span to the next. Of a replica's ranks the first has a row, and
    of many replicas MOST_ROWS.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            return None
        content = from_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise FileError(f"{path} is no trace of heteropp-train: {error}") from None
    try:
        return _drawn(content, plan)
    except (AttributeError, LookupError, TypeError, ValueError):  # another program's
        raise FileError(
            f"{path} is no trace of heteropp-train; expected its events, each with a rank as tid"
        ) from None


def _drawn(content: dict[str, Any], plan: dict[str, Any] | None) -> dict[str, Any]:
    events = content["traceEvents"]
    names = {
        event["pid"]: event["args"]["name"].partition(",")[0]
        for event in events
        if event.get("name") == "process_name"
    }
    spans: dict[Track, list[dict]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            spans[event["pid"], event["tid"]].append(event)
    rows = _rows({tid if tid >= 0 else ~tid for _, tid in spans}, plan)
    shown = set(rows)
    kinds = list(dict.fromkeys(event["cat"] for each in spans.values() for event in each))
    number = {kind: index for index, kind in enumerate(kinds)}
    timelines: list[dict[str, Any]] = []
    begins: dict[Track, list[float]] = {}
    places: dict[Track, tuple[int, list[int]]] = {}
    for process, name in sorted(names.items()):
        of_rows = []
        for row, rank in enumerate(rows):
            # reductions beside the work have a thread of their own, and are drawn below it
            own = sorted(
                [*spans.get((process, ~rank), ()), *spans.get((process, rank), ())],
                key=lambda event: event["ts"],
            )
            of_rows.append([_span(event, number) for event in own])
            of_work = [i for i, event in enumerate(own) if event["tid"] == rank]
            begins[process, rank] = [own[i]["ts"] for i in of_work]
            places[process, rank] = row, of_work
        timelines.append({"name": name, "rows": of_rows})
    return {
        "rows": [{"rank": rank} for rank in rows],
        "ranks": len({tid if tid >= 0 else ~tid for _, tid in spans}),
        "kinds": [
            {"name": kind, "meaning": MEANINGS.get(kind, kind.replace("_", " ")),
             "colour": COLOURS.get(kind, WAITING), "works": kind in COLOURS}
            for kind in kinds
        ],
        "timelines": timelines,
        "arrows": _arrows(events, shown, sorted(names), begins, places),
        "step": content.get("otherData", {}).get("step"),
    }  # fmt: skip


def _rows(ranks: set[int], plan: dict[str, Any] | None) -> list[int]:
    """The ranks that get a row: stage by stage the first of each replica."""
    if plan is None:
        return sorted(ranks)[:MOST_ROWS]
    stages = [stage for pipeline in plan["pipelines"] for stage in pipeline["stages"]]
    of_each = max(1, MOST_ROWS // max(1, len(stages)))
    first = [replica["ranks"][0] for stage in stages for replica in stage["replicas"][:of_each]]
    return [rank for rank in first[:MOST_ROWS] if rank in ranks]


def _span(event: dict[str, Any], number: dict[str, int]) -> list[float]:
    found = NAME.match(event["name"])
    micro_batch, ministage = (found[2], found[3]) if found else (None, None)
    return [
        number[event["cat"]],
        -1 if micro_batch is None else int(micro_batch),
        int(ministage or 0),
        event["ts"],
        event["dur"],
    ]


def _arrows(
    events: list[dict],
    shown: set[int],
    processes: list[int],
    begins: dict[Track, list[float]],
    places: dict[Track, tuple[int, list[int]]],
) -> list[list[int]]:
    """The flows of the trace whose both ends are shown."""
    ends: dict[int, list[int]] = {}

    def at(event: dict) -> list[int]:
        track = event["pid"], event["tid"]
        row, spans = places[track]
        return [row, spans[max(bisect_right(begins[track], event["ts"]) - 1, 0)]]

    arrows = []
    for event in events:
        if event["ph"] not in ("s", "f") or event["tid"] not in shown:
            continue
        if event["ph"] == "s":
            ends[event["id"]] = at(event)
        elif event["id"] in ends:
            timeline = processes.index(event["pid"])
            arrows.append([timeline, *ends[event["id"]], *at(event)])
    return arrows
