"""What rank 0 shows and leaves of a run: progress, metrics.jsonl, pictures and the summary."""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from heteropp.files import make_folder
from heteropp.timeline import Span, draw_timeline, write_chrome_trace
from heteropp.training.metrics import MetricsFile, StepMetrics, draw_loss


@dataclass(frozen=True)
class Summary:
    """What a run came to; `heteropp-train --json` prints it."""

    steps: int
    first_loss: float
    last_loss: float
    measured_step_s: float  # median
    predicted_step_s: float | None
    pacing_fidelity: float | None  # median over the steps of the least over the ranks
    tokens_per_s: float
    output: str


class Reporter:
    def __init__(self, output: Path, completed: int, steps: int, quiet: bool) -> None:
        make_folder(output)
        self.output, self.first_here, self.steps = output, completed, steps
        self.file = MetricsFile(output / "metrics.jsonl", completed)
        self.console = Console(file=sys.stderr if quiet else sys.stdout, highlight=False)
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

    def step(self, metrics: StepMetrics) -> None:
        self.file.append(metrics)
        figures = f"loss {metrics.loss:.4f}  {metrics.tokens_per_s:,.0f} tokens/s"
        figures += f"  step {_ms(metrics.step_s)}"
        if metrics.predicted_step_s is not None:
            figures += f" (predicted {_ms(metrics.predicted_step_s)})"
        if metrics.pacing_fidelity is not None:
            figures += f"  pacing fidelity {metrics.pacing_fidelity:.1%}"
        self.progress.update(self.task, completed=metrics.step, figures=figures)
        every = max(1, self.steps // 10)
        if not self.console.is_terminal and (metrics.step % every == 0 or metrics.step == 1):
            self.console.print(f"step {metrics.step}/{self.steps}  {figures}", soft_wrap=True)

    def stop(self) -> None:
        """Gives the terminal back."""
        self.progress.stop()

    def nothing_to_do(self) -> None:
        """For a run that was resumed at its end."""
        self.stop()
        self.console.print(
            f"nothing to do: the checkpoint is of step {self.first_here}, and --steps {self.steps}",
            soft_wrap=True,
        )

    def trace(self, measured: list[Span], predicted: list[Span], labels: list[str]) -> None:
        """Leaves one step as measured and, where there is one, as predicted, on one time axis."""
        zero_s = min(span.start_s for span in measured)
        from_zero = [
            replace(span, start_s=span.start_s - zero_s, end_s=span.end_s - zero_s)
            for span in measured
        ]
        timelines = {"predicted": predicted} if predicted else {}
        timelines["measured"] = from_zero
        write_chrome_trace(self.output / "trace.json", timelines)
        draw_timeline(self.output / "timeline.png", timelines, labels)

    def finish(self) -> Summary | None:
        """Draws the loss; gives the summary of the steps run here, None when there were none."""
        self.stop()
        self.file.close()
        every = self.file.metrics
        here = [metrics for metrics in every if metrics["step"] > self.first_here]
        if not here:
            return None
        draw_loss(every, self.output / "loss.png")
        fidelities = [m["pacing_fidelity"] for m in here if m["pacing_fidelity"] is not None]
        return Summary(
            steps=self.steps,
            first_loss=every[0]["loss"],
            last_loss=every[-1]["loss"],
            measured_step_s=statistics.median(m["step_s"] for m in here),
            predicted_step_s=here[-1]["predicted_step_s"],
            pacing_fidelity=statistics.median(fidelities) if fidelities else None,
            tokens_per_s=statistics.median(m["tokens_per_s"] for m in here),
            output=str(self.output),
        )

    def show(self, summary: Summary) -> None:
        """The run's last lines."""
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
        self.console.print(line, soft_wrap=True)
        self.console.print(f"written to {summary.output}", soft_wrap=True)


def as_json(summary: Summary) -> str:
    return json.dumps(asdict(summary), indent=2)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"
