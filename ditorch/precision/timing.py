"""MeasureTime: device time of every operator, by events, and a Chrome trace of it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, Protocol, Unpack

import torch

import ditorch
from ditorch._ditorch import host_runs_here
from ditorch.precision.call import Call
from ditorch.precision.place import Place, rank
from ditorch.precision.results import Findings, OperatorTime, write_findings
from ditorch.precision.select import Selection
from ditorch.precision.tensors import chip_of, has_to_stay
from ditorch.precision.tool import Proceed, Tool, new_findings
from hyperhetero.output import keep_permissions, target_of

_MOST_UNRESOLVED = 8192  # calls whose events are kept before the oldest are resolved
_BATCH = 4096


class _Clock(Protocol):
    """Marks moments without holding the host, and tells them apart later."""

    def mark(self) -> Any: ...
    def seconds(self, mark: Any) -> float:
        """Returns the seconds from the clock's creation to the mark; waits until it is reached."""

    def seconds_between(self, start: Any, end: Any) -> float:
        """Returns the seconds between two marks; waits until the end is reached."""

    def rebase(self, mark: Any) -> None:
        """Measures later moments from this one, so that they stay precise in a long run."""


class _HostClock:
    def __init__(self) -> None:
        self._start_ns = time.perf_counter_ns()

    def mark(self) -> int:
        return time.perf_counter_ns()

    def seconds(self, mark: int) -> float:
        return (mark - self._start_ns) * 1e-9

    def seconds_between(self, start: int, end: int) -> float:
        return (end - start) * 1e-9

    def rebase(self, mark: int) -> None:
        pass


class _ChipClock:
    """Events on the current stream; an emulated chip's are in emulated time."""

    def __init__(self) -> None:
        self._base_s = 0.0
        self._base = self.mark()

    def mark(self) -> torch.Event:
        event = torch.Event(ditorch.device, enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: torch.Event) -> float:
        return self._base_s + self.seconds_between(self._base, mark)

    def seconds_between(self, start: torch.Event, end: torch.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end) * 1e-3  # torch counts milliseconds

    def rebase(self, mark: torch.Event) -> None:
        self._base_s, self._base = self.seconds(mark), mark


@dataclass(slots=True)
class _Timed:
    """A call whose time is not known yet."""

    place: Place
    stream: int
    start: Any
    end: Any
    on_host: bool


@dataclass(slots=True)
class _Total:
    calls: int = 0
    total_s: float = 0.0
    max_s: float = 0.0
    host_calls: int = 0
    host_s: float = 0.0


class MeasureTime(Tool):
    """Device time per operator: calls, total, mean and longest, and how much the host computed.

    Events around each call mark the stream it runs on, and are read later: the chip is not held.
    Where the chip waits for the host, the time between the marks includes that wait, as on any
    stream. On a machine without a chip the host's clock measures. Views launch nothing and are left
    out, and so are the host's own operators where there is a chip.

    Args:
        trace: The file of a Chrome trace (chrome://tracing, ui.perfetto.dev): one process a rank,
            one track a stream and phase; written as the tool is closed. "trace.json" is rank 0's,
            and "trace-rank1.json" lies beside it.
        output: The folder for the findings, a file for each rank; without it none are written.
    """

    rank_in_line: ClassVar[int] = 40

    def __init__(
        self,
        *,
        trace: Path | None = None,
        output: Path | None = None,
        **selection: Unpack[Selection],
    ) -> None:
        super().__init__(**selection)
        self.output = output
        self.trace = trace
        self._totals: dict[str, _Total] = {}
        self._timed: deque[_Timed] = deque()
        self._lock = threading.Lock()

    def opened(self) -> None:
        self._on_chip = ditorch.device.type != "cpu"
        self._clock: _Clock = _ChipClock() if self._on_chip else _HostClock()
        self._tracks = _Trace(self.trace) if self.trace is not None else None

    def around(self, call: Call, proceed: Proceed) -> Any:
        if has_to_stay(call) or (self._on_chip and chip_of(call) is None):
            return proceed(call)
        stream = torch.accelerator.current_stream().stream_id if self._on_chip else 0
        host_runs = host_runs_here()
        start = self._clock.mark()
        results = proceed(call)
        end = self._clock.mark()
        timed = _Timed(call.place, stream, start, end, host_runs_here() > host_runs)
        with self._lock:
            self._timed.append(timed)
            if len(self._timed) > _MOST_UNRESOLVED:
                self._resolve(_BATCH)
        return results

    def findings(self) -> Findings:
        """`times`, the longest total first. Waits for the calls that are still running."""
        with self._lock:
            self._resolve(len(self._timed))
        totals = sorted(self._totals.items(), key=lambda each: -each[1].total_s)
        times = [
            OperatorTime(
                operator=operator,
                calls=each.calls,
                total_s=each.total_s,
                mean_s=each.total_s / each.calls,
                max_s=each.max_s,
                host_calls=each.host_calls,
                host_s=each.host_s,
            )
            for operator, each in totals
        ]
        return new_findings("time", times=times, summary=_summary(times), notes=_notes())

    def closed(self) -> None:
        findings = self.findings()
        if self._tracks is not None:
            self._tracks.finish(findings.rank, f"rank {findings.rank}: {findings.chip}")
        if self.output is not None:
            write_findings(findings, self.output)

    def _resolve(self, calls: int) -> None:
        for _ in range(calls):
            timed = self._timed.popleft()
            duration_s = self._clock.seconds_between(timed.start, timed.end)
            total = self._totals.setdefault(timed.place.operator, _Total())
            total.calls += 1
            total.total_s += duration_s
            total.max_s = max(total.max_s, duration_s)
            if timed.on_host:
                total.host_calls += 1
                total.host_s += duration_s
            if self._tracks is not None:
                self._tracks.add(timed, self._clock.seconds(timed.start), duration_s)
        if calls:
            self._clock.rebase(timed.start)


class _Trace:
    """A Chrome trace that grows on disk, under another name until it is finished."""

    def __init__(self, path: Path) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        target = target_of(self._path)
        self._unfinished = target.with_name(f".{target.name}.{os.getpid()}")
        self._file: IO[str] = self._unfinished.open("w", encoding="utf-8")
        self._file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        self._tracks: dict[tuple[int, str], int] = {}

    def add(self, timed: _Timed, start_s: float, duration_s: float) -> None:
        place = timed.place
        track = self._tracks.setdefault((timed.stream, place.phase), len(self._tracks))
        details = {
            "module": place.module,
            "function": place.function,
            "source": place.source,
            "step": place.step,
            "index": place.index,
            "on host": timed.on_host,
        }
        event = {
            "ph": "X",
            "name": place.operator,
            "cat": place.phase,
            "pid": place.rank,
            "tid": track,
            "ts": round(start_s * 1e6, 3),
            "dur": round(duration_s * 1e6, 3),
            "args": details,
        }
        self._file.write(json.dumps(event) + ",\n")

    def finish(self, rank: int, process: str) -> None:
        names = [
            _metadata("thread_name", track, f"stream {stream}, {phase}")
            for (stream, phase), track in self._tracks.items()
        ]
        names.append(_metadata("process_name", 0, process))
        with self._file:
            self._file.write(",\n".join(json.dumps(name) for name in names) + "\n]}\n")
        path = self._path
        target = target_of(path.with_stem(f"{path.stem}-rank{rank}") if rank else path)
        keep_permissions(self._unfinished, target)
        self._unfinished.replace(target)


def _metadata(kind: str, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank(), "tid": track, "args": {"name": name}}


def _summary(times: list[OperatorTime]) -> str:
    calls = sum(each.calls for each in times)
    total_s = sum(each.total_s for each in times)
    host_s = sum(each.host_s for each in times)
    host_calls = sum(each.host_calls for each in times)
    return (
        f"{total_s:.4g} s in {calls} calls of {len(times)} operators; the host computed "
        f"{host_calls} of them for lack of a kernel, {host_s / total_s if total_s else 0:.0%} of "
        "the time"
    )


def _notes() -> list[str]:
    pacing = ditorch.pacing()
    if pacing is None:
        return []
    return [f"emulated time, at a pacing fidelity of {pacing.fidelity:.3f}"]
