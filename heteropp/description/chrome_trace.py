"""Timelines as a Chrome trace, which Perfetto opens too."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from heteropp.description.files import write_text
from heteropp.description.timeline import Span, in_words

Flow = tuple[Span, Span]  # an arrow from the end of one to the begin of the other
Curve = Sequence[tuple[float, int]]  # seconds, and bytes from then on


def write_chrome_trace(
    path: Path,
    timelines: Mapping[str, Sequence[Span]],
    labels: Mapping[int, str] | None = None,
    memory: Mapping[int, Curve] | None = None,
    *,
    flows: Mapping[str, Sequence[Flow]] | None = None,
    sent: Mapping[str, Mapping[int, Curve]] | None = None,
    slices: Mapping[int, int] | None = None,
    chips: str = "",
    step: int | None = None,
) -> None:
    """One process a timeline ("predicted", "measured"), one thread a rank, one time axis.

    labels: other names of ranks. memory: by rank, what it holds, as counters beside the first
    timeline. flows: by timeline, what follows on what. sent: by timeline and rank, what it has sent
    to other stages so far, as counters. slices: by rank, those of its micro-batches, where it has
    some. chips: in words, for the names of the processes. step:
    which one was measured. Raises FileError.
    """
    events: list[dict] = []
    names = labels or {}
    for process, (name, spans) in enumerate(timelines.items()):
        called = {"name": f"{name}, on {chips}" if chips else name}
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": called})
        aside = _aside(spans)
        for tid in [
            *sorted({span.rank for span in spans}),
            *(~rank for rank in sorted({span.rank for span in aside})),
        ]:
            own = names.get(max(tid, ~tid), f"rank {max(tid, ~tid)}")
            label = {"name": own if tid >= 0 else f"reductions of {own}"}
            events.append(
                {"ph": "M", "name": "thread_name", "pid": process, "tid": tid, "args": label}
            )
        events += _spans(process, spans, aside, slices or {})
        events += _arrows(process, (flows or {}).get(name, ()), len(events), slices or {})
        for rank, curve in (sent or {}).get(name, {}).items():
            events += _counter(process, f"bytes sent by rank {rank}", curve)
    for rank, curve in (memory or {}).items():
        events += _counter(0, f"memory of rank {rank}", curve)
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"step": step}}
    write_text(path, json.dumps(trace))


def _spans(
    process: int, spans: Sequence[Span], aside: set[Span], slices: Mapping[int, int]
) -> Iterator[dict]:
    for span in spans:
        numbered = "" if span.micro_batch is None else f" {_numbered(span, slices)}"
        numbered += f", ministage {span.ministage}" if span.ministage else ""
        yield {
            "ph": "X",
            "name": span.name + numbered,
            "cat": span.name,
            "pid": process,
            "tid": ~span.rank if span in aside else span.rank,
            "ts": _us(span.start_s),
            "dur": _us(span.end_s - span.start_s),
        }


def _numbered(span: Span, slices: Mapping[int, int]) -> str:
    """Returns a span's micro-batch, and which slice of it where it has some."""
    assert span.micro_batch is not None
    return in_words(span.micro_batch, slices.get(span.rank, 1))


def _arrows(
    process: int, flows: Sequence[Flow], first_id: int, slices: Mapping[int, int]
) -> Iterator[dict]:
    """Both ends lie on the begin of their span: an end would belong to the next one as well."""
    for number, (before, after) in enumerate(flows, first_id):
        flow = {
            "name": f"micro-batch {_numbered(after, slices)}",
            "cat": "micro-batch",
            "id": number,
            "pid": process,
        }
        yield {**flow, "ph": "s", "tid": before.rank, "ts": _us(before.start_s)}
        yield {**flow, "ph": "f", "bp": "e", "tid": after.rank, "ts": _us(after.start_s)}


def _counter(process: int, name: str, curve: Curve) -> Iterator[dict]:
    for time_s, size in curve:
        yield {
            "ph": "C",
            "name": name,
            "pid": process,
            "ts": _us(time_s),
            "args": {"bytes": size},
        }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _aside(spans: Sequence[Span]) -> set[Span]:
    """Returns the reductions that overlap other actions of their rank.

    They need a thread of their own in a Chrome trace, as a thread's spans may not overlap.
    """
    work: dict[int, list[Span]] = {}
    for span in spans:
        if span.name != "reduce":
            work.setdefault(span.rank, []).append(span)
    return {
        span
        for span in spans
        if span.name == "reduce"
        and any(
            max(span.start_s, other.start_s) < min(span.end_s, other.end_s)
            for other in work.get(span.rank, ())
        )
    }
