"""What rank 0 shows and leaves of a run: progress, metrics.jsonl, pictures and the summary."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from heteropp.description.chrome_trace import write_chrome_trace
from heteropp.description.files import make_folder
from heteropp.description.plan import Plan
from heteropp.description.timeline import Span, draw_timeline
from heteropp.description.used_chips import chips_in_words
from heteropp.runtime.measuring.events import EventKind, keep_event
from heteropp.runtime.measuring.metrics import (
    FAITHFUL,
    METRICS,
    MetricsFile,
    StepMetrics,
    draw_loss,
    validation_losses,
)
from heteropp.runtime.measuring.trackers.tracking import Tracking
from heteropp.schedule.flows import flows, sent_bytes, slices_by_rank
from hyperhetero.progress import SILENCE_S, Lines

if TYPE_CHECKING:
    from heteropp.runtime.measuring.trackers.tracking import Tracker


TRACE = "trace.json"  # in a run's output


@dataclass(frozen=True)
class Summary:
    """What a run came to; `heteropp-train --json` prints it."""

    steps: int
    first_loss: float
    last_loss: float
    validation_loss: float | None  # the newest
    validation_losses: dict[str, float]  # likewise, by set
    measured_step_s: float  # median
    predicted_step_s: float | None
    pacing_fidelity: float | None  # median over the steps of the least over the ranks
    tokens_per_s: float
    tokens_per_chip_per_s: float
    utilization: float | None  # MFU
    bubble: float
    communication: float
    waiting_cpu: float | None  # share of a core that a rank takes while it waits for messages
    output: str


NO_TRACKING = Tracking()


@dataclass(frozen=True)
class TracedStep:
    """One step as it was measured, and as every step is predicted."""

    number: int
    measured: list[Span]  # by the time of day
    predicted: list[Span]  # empty where nothing is
    memory: dict[int, list[tuple[float, int]]]  # predicted: (seconds, bytes from then on), by rank

    @property
    def timelines(self) -> dict[str, list[Span]]:
        """Both, from the start of the step."""
        zero_s = min(span.start_s for span in self.measured)
        from_zero = [
            replace(span, start_s=span.start_s - zero_s, end_s=span.end_s - zero_s)
            for span in self.measured
        ]
        return ({"predicted": self.predicted} if self.predicted else {}) | {"measured": from_zero}


class Reporter:
    def __init__(
        self,
        output: Path,
        completed: int,
        steps: int,
        quiet: bool,
        tracking: Tracking = NO_TRACKING,
        restarts: int = 0,
    ) -> None:
        """Raises TrackingError."""
        make_folder(output)
        self.output, self.first_here, self.steps = output, completed, steps
        self.file = MetricsFile(output / METRICS, completed)
        self.console = Console(
            file=sys.stderr if quiet else sys.stdout, highlight=False, markup=False
        )
        self.trackers: dict[str, Tracker] = tracking.open(output, completed, restarts, self._say)
        self.progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.progress.add_task("", total=steps, completed=completed, figures="")
        self.progress.start()
        self.printed_at_s = time.monotonic()
        self.newest_step = completed
        self.lines = Lines(self._under_way, self.console)
        self.lines.start()

    def step(self, metrics: StepMetrics) -> None:
        self.file.append(metrics)
        self._track(metrics)
        figures = f"loss {metrics.loss:.4f}  {metrics.tokens_per_s:,.0f} tokens/s"
        figures += f"  step {_ms(metrics.step_s)}"
        if metrics.predicted_step_s is not None:
            figures += f" (predicted {_ms(metrics.predicted_step_s)})"
        if metrics.pacing_fidelity is not None:
            figures += f"  pacing fidelity {metrics.pacing_fidelity:.1%}"
            figures += "" if metrics.pacing_fidelity >= FAITHFUL else " (host too busy)"
        self.progress.update(self.task, completed=metrics.step, figures=figures)
        self.newest_step = metrics.step
        if metrics.validation_loss is not None:
            self.console.print(
                f"step {metrics.step}/{self.steps}  validation loss {_losses(metrics)}",
                soft_wrap=True,
            )
        every = max(1, self.steps // 10)
        is_due = metrics.step % every == 0 or metrics.step == 1
        is_due = is_due or time.monotonic() - self.printed_at_s > SILENCE_S
        if not self.console.is_terminal and is_due:
            self.printed_at_s = time.monotonic()
            self.lines.spoke()
            self.console.print(f"step {metrics.step}/{self.steps}  {figures}", soft_wrap=True)

    def _track(self, metrics: StepMetrics) -> None:
        """Hands a step to the trackers; one that fails gets no more, and the training goes on."""
        for name, tracker in list(self.trackers.items()):
            try:
                tracker.step(metrics)
            except Exception as error:  # whatever the service's library raises
                del self.trackers[name]
                self.warn(f"{name} fails and gets no more steps: {_reason(error)}")

    def _say(self, line: str) -> None:
        self.console.print(line, soft_wrap=True)

    def stop(self) -> None:
        """Gives the terminal back."""
        self.lines.stop()
        self.progress.stop()

    def _under_way(self) -> str:
        """What is said where steps take so long that a person would wait for the next line."""
        return f"step {self.newest_step + 1}/{self.steps} is under way"

    def close(self) -> None:
        """Gives the terminal back, and the files: another reporter may go on with them.

        A tracker that cannot be closed is told of, and the training goes on.
        """
        self.stop()
        self.file.close()
        for name, tracker in self.trackers.items():
            try:
                tracker.close()
            except Exception as error:  # whatever the service's library raises
                self._say(f"warning: {name} cannot be closed: {_reason(error)}")
        self.trackers = {}

    def warn(self, what: str, kind: EventKind = "warning") -> None:
        """Prints a warning about the newest step, and keeps it."""
        step = self.file.metrics[-1]["step"]
        keep_event(self.output, kind, step, what)
        self.console.print(f"step {step}/{self.steps}  warning: {what}", soft_wrap=True)

    def stopped(self, completed: int) -> None:
        """Prints the last line of a run that was told to stop before its end."""
        self.close()
        keep_event(self.output, "stop", completed, "told to stop; the step is saved")
        self.console.print(
            f"told to stop: step {completed} is saved, and --resume goes on from it",
            soft_wrap=True,
        )

    def nothing_to_do(self) -> None:
        """Says that there is nothing to do, for a run that was resumed or recovered at its end."""
        self.stop()
        self.console.print(
            f"nothing to do: step {self.first_here} is done, and --steps {self.steps}",
            soft_wrap=True,
        )

    def trace(self, plan: Plan | None, step: TracedStep, labels: Sequence[str]) -> None:
        """Leaves one step as measured and, where there is one, as predicted, on one time axis.

        plan: what every step runs; None where they run several.
        """
        timelines = step.timelines
        write_chrome_trace(
            self.output / TRACE,
            timelines,
            dict(enumerate(labels)),
            step.memory,
            flows={name: flows(plan, spans) for name, spans in timelines.items()} if plan else None,
            sent={name: sent_bytes(plan, spans) for name, spans in timelines.items()}
            if plan
            else None,
            slices=slices_by_rank(plan) if plan else None,
            chips=chips_in_words(plan) if plan else "",
            step=step.number,
        )

    def draw(self, step: TracedStep, labels: Sequence[str]) -> None:
        """Draws the timelines of a step."""
        draw_timeline(self.output / "timeline.png", step.timelines, labels)

    def finish(self) -> Summary | None:
        """Draws the loss; gives the summary of the steps run here.

        Where there were none, of those that earlier runs left metrics of; None without any.
        """
        self.close()
        every = self.file.metrics
        if not every:
            return None
        here = [metrics for metrics in every if metrics["step"] > self.first_here] or every
        losses = [m["loss"] for m in every if m["loss"] is not None] or [math.nan]
        draw_loss(every, self.output / "loss.png")
        validated = [m for m in here if m["validation_loss"] is not None]

        def median(name: str) -> float:
            return statistics.median(m[name] for m in here)

        def known_median(name: str) -> float | None:
            known = [m[name] for m in here if m.get(name) is not None]  # some lines may lack it
            return statistics.median(known) if known else None

        return Summary(
            steps=self.steps,
            first_loss=losses[0],
            last_loss=losses[-1],
            validation_loss=validated[-1]["validation_loss"] if validated else None,
            validation_losses=validation_losses(validated[-1]) if validated else {},
            measured_step_s=median("step_s"),
            predicted_step_s=here[-1]["predicted_step_s"],
            pacing_fidelity=known_median("pacing_fidelity"),
            tokens_per_s=median("tokens_per_s"),
            tokens_per_chip_per_s=median("tokens_per_chip_per_s"),
            utilization=known_median("utilization"),
            bubble=median("bubble"),
            communication=median("communication"),
            waiting_cpu=known_median("waiting_cpu"),
            output=str(self.output),
        )

    def show(self, summary: Summary) -> None:
        """Prints the run's last lines."""
        self.console.print(
            f"loss {summary.first_loss:.4f} -> {summary.last_loss:.4f} over {summary.steps} steps, "
            f"{summary.tokens_per_s:,.0f} tokens/s",
            soft_wrap=True,
        )
        line = f"measured step {_ms(summary.measured_step_s)} (median)"
        if summary.predicted_step_s is not None:
            ratio = summary.measured_step_s / summary.predicted_step_s - 1
            line += f", predicted {_ms(summary.predicted_step_s)}: {ratio:+.1%}"
        if summary.pacing_fidelity is not None:
            line += f"; pacing fidelity {summary.pacing_fidelity:.1%}"
            if summary.pacing_fidelity < FAITHFUL:
                line += ", so this host was too busy for its times to say anything of the chips"
        self.console.print(line, soft_wrap=True)
        busy = summary.pacing_fidelity is not None and summary.pacing_fidelity < FAITHFUL
        line = "by this busy host's times: " if busy else ""
        line += f"bubble {summary.bubble:.1%}, communication {summary.communication:.1%}"
        if summary.utilization is not None:
            line += f", model FLOPs utilization {summary.utilization:.1%}"
        line += f", {summary.tokens_per_chip_per_s:,.1f} tokens/s a chip"
        if summary.waiting_cpu is not None:
            line += f"; a rank that waits takes {summary.waiting_cpu:.1%} of a core"
        self.console.print(line, soft_wrap=True)
        self.console.print(f"written to {summary.output}", soft_wrap=True)


def as_json(summary: Summary) -> str:
    return json.dumps(asdict(summary), indent=2)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _losses(metrics: StepMetrics) -> str:
    """Returns the validation loss, and those of the sets where they are several."""
    if len(metrics.validation_losses) < 2:
        return f"{metrics.validation_loss:.4f}"
    each = (f"{name} {loss:.4f}" for name, loss in metrics.validation_losses.items())
    return f"{metrics.validation_loss:.4f} ({', '.join(each)})"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
