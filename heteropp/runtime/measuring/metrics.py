"""What a run measures: when each action ran on the device, and what each step came to."""

from __future__ import annotations

import ctypes
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from heteropp.description.files import FileError, write_text
from heteropp.description.timeline import drawing, save

METRICS = "metrics.jsonl"  # in a run's output
FAITHFUL = 0.95  # pacing fidelity; below it, times say more of the host than of its chips
ORIGIN_S = 60.0  # seconds after which events are held against a newer one
Mark = Any  # a clock's own: nanoseconds, or an event


class Clock(Protocol):
    """Marks moments of the device's work without waiting for it."""

    def mark(self) -> Mark:
        """Returns a mark of the moment when the work submitted so far will have finished."""

    def seconds(self, mark: Mark) -> float:
        """Returns a mark in seconds of this machine's monotonic clock; waits until it has come."""


class HostClock:
    """The CPU: work has finished when the call returns."""

    def mark(self) -> int:
        return time.monotonic_ns()

    def seconds(self, mark: int) -> float:
        return mark * 1e-9


class EmulatedClock:
    """An emulated chip: its current stream knows when the submitted work will have finished."""

    def __init__(self, ready_at_ns: int, device_index: int = 0) -> None:
        function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int32)
        self.ready_at_ns, self.device_index = function(ready_at_ns), device_index

    def mark(self) -> int:
        # an idle stream's clock stands in the past; work begins no earlier than now
        return max(self.ready_at_ns(self.device_index), time.monotonic_ns())

    def seconds(self, mark: int) -> float:
        return mark * 1e-9


@dataclass(frozen=True)
class Origin:
    """An event that has come, and when it came by the host's clock."""

    event: torch.Event
    at_s: float


class EventClock:
    """A real chip: events on its current stream, held against a moment of the host's clock.

    The time between two events is a float32 of milliseconds, which is coarse where they are far
    from each other. So that moment, the origin, moves on with the training. Each mark keeps the
    origin that it was made with: that one came before, and not all vendors have negative times.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.accelerator.synchronize()
        self.origin = Origin(self._event(), time.monotonic())

    def mark(self) -> tuple[torch.Event, Origin]:
        return self._event(), self.origin

    def seconds(self, mark: tuple[torch.Event, Origin]) -> float:
        event, origin = mark
        event.synchronize()
        at_s = origin.at_s + origin.event.elapsed_time(event) * 1e-3
        if at_s - self.origin.at_s > ORIGIN_S:
            self.origin = Origin(event, at_s)
        return at_s

    def _event(self) -> torch.Event:
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event


class WaitingClock:
    """A real chip whose events keep no time: the host waits for the chip, and looks at its own."""

    def mark(self) -> int:
        torch.accelerator.synchronize()
        return time.monotonic_ns()

    def seconds(self, mark: int) -> float:
        return mark * 1e-9


def clock_of(device: torch.device) -> Clock:
    """Returns the clock of a real chip: of its events, if its plugin gives them the time."""
    try:
        clock = EventClock(device)
        clock.seconds(clock.mark())
    except RuntimeError:
        return WaitingClock()
    return clock


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl."""

    step: int  # from 1
    loss: float
    learning_rate: float
    gradient_norm: float
    skipped: bool  # it changed no parameter: the loss or the gradient was not finite, or a spike
    loss_scale: float  # of a float16 model; 1 of others
    validation_loss: float | None  # after the step, of all sets' tokens; None where not asked for
    validation_losses: dict[str, float]  # by set; empty where not asked for
    step_s: float
    predicted_step_s: float | None
    tokens_per_s: float
    tokens_per_chip_per_s: float
    utilization: float | None  # of the chips' peaks, by the model's own FLOPs (MFU)
    bubble: float  # share of the mean rank's step: it waited for others to compute
    communication: float  # likewise: messages under way, gathers, reductions that nothing hid
    waiting_cpu: float | None  # share of a core that a rank takes while it waits for messages
    pacing_fidelity: float | None  # the least over the ranks; None on real chips
    peak_memory_bytes: tuple[int, ...]  # by rank
    sent_bytes: dict[str, int]  # in the step, by link between nodes: "a-0 to b-0", "inside a-0"


class MetricsFile:
    """metrics.jsonl: one JSON object a step, appended as the run goes."""

    def __init__(self, path: Path, completed_steps: int) -> None:
        """Keeps the lines of the first `completed_steps` steps, which a resumed run continues."""
        text = path.read_text() if path.exists() else ""
        self.path = path
        self.metrics, kept = [], ""
        for line in text.splitlines() if completed_steps else ():
            if _step_of(line) <= completed_steps:
                self.metrics.append(json.loads(line))
                kept += line + "\n"
        if kept != text or not path.exists():
            write_text(path, kept)
        self.file = open(path, "a", buffering=1)  # noqa: SIM115

    def append(self, metrics: StepMetrics) -> None:
        line = {name: _json_number(value) for name, value in asdict(metrics).items()}
        self.metrics.append(line)
        try:
            self.file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise FileError(f"{self.path} cannot be written: {error.strerror}") from None

    def close(self) -> None:
        self.file.close()


def newest_step(path: Path) -> int | None:
    """Returns the last step that metrics.jsonl has a line of; None where it has none."""
    lines = path.read_text().splitlines() if path.exists() else []
    return max((int(step) for step in map(_step_of, lines) if math.isfinite(step)), default=None)


def _json_number(value: Any) -> Any:
    """Returns the value, or None for an infinity or NaN, which JSON cannot express."""
    if isinstance(value, dict):
        return {name: _json_number(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a line torn by the end of an earlier run


def validation_losses(metrics: dict[str, Any]) -> dict[str, float]:
    """Returns the losses of one line of metrics.jsonl that are known, by set.

    Lines of an earlier release have one, of a set without a name.
    """
    losses = metrics.get("validation_losses") or {"": metrics.get("validation_loss")}
    return {name: loss for name, loss in losses.items() if loss is not None}


def _label(name: str) -> str:
    escaped = name.replace("$", r"\$")  # which would begin a formula
    return f"validation: {escaped}" if name else "validation"


def draw_loss(metrics: list[dict[str, Any]], path: Path) -> None:
    """Draws the loss over the steps. Raises FileError."""
    figure, axes = drawing().subplots(figsize=(7, 4))
    axes.plot([m["step"] for m in metrics], [m["loss"] for m in metrics], label="training")
    lines: dict[str, list[tuple[int, float]]] = {}
    for line in metrics:
        for name, loss in validation_losses(line).items():
            lines.setdefault(name, []).append((line["step"], loss))
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), "o-", label=_label(name))
    if lines:
        axes.legend()
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    save(figure, path)
