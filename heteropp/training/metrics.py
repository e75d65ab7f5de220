"""What a run measures: when each action ran on the device, and what each step came to."""

from __future__ import annotations

import ctypes
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

Mark = Any  # a clock's own: nanoseconds, or an event


class Clock(Protocol):
    """Marks moments of the device's work without waiting for it."""

    def mark(self) -> Mark:
        """The moment when the work submitted so far will have finished."""

    def seconds(self, mark: Mark) -> float:
        """A mark as seconds on this machine's monotonic clock; once its work has finished."""


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


class EventClock:
    """A real chip: events on its current stream, held against one moment of the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.accelerator.synchronize()
        self.origin, self.origin_s = self.mark(), time.monotonic()

    def mark(self) -> torch.Event:
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: torch.Event) -> float:
        return self.origin_s + self.origin.elapsed_time(mark) * 1e-3


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl."""

    step: int  # from 1
    loss: float
    learning_rate: float
    gradient_norm: float
    step_s: float
    predicted_step_s: float | None
    tokens_per_s: float
    pacing_fidelity: float | None  # the least over the ranks; None on real chips
    peak_memory_bytes: tuple[int, ...]  # by rank


class MetricsFile:
    """metrics.jsonl: one JSON object a step, appended as the run goes."""

    def __init__(self, path: Path, completed_steps: int) -> None:
        """Keeps the lines of the first `completed_steps` steps, which a resumed run continues."""
        lines = path.read_text().splitlines() if path.exists() and completed_steps else []
        kept = [line for line in lines if _step_of(line) <= completed_steps]
        self.metrics = [json.loads(line) for line in kept]
        self.file = open(path, "w", buffering=1)  # noqa: SIM115
        self.file.writelines(line + "\n" for line in kept)

    def append(self, metrics: StepMetrics) -> None:
        self.metrics.append(asdict(metrics))
        self.file.write(json.dumps(asdict(metrics)) + "\n")

    def close(self) -> None:
        self.file.close()


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a line torn by the end of an earlier run


def draw_loss(metrics: list[dict[str, Any]], path: Path) -> None:
    """Draws the loss over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot([m["step"] for m in metrics], [m["loss"] for m in metrics])
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
