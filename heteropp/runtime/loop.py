"""What every rank does in turn: a step, whose metrics rank 0 reports, and the end of a run."""

from __future__ import annotations

import json
from dataclasses import asdict

from heteropp.description.timeline import Span
from heteropp.runtime.measuring.gauges import Reading
from heteropp.runtime.measuring.metrics import StepMetrics
from heteropp.runtime.measuring.report import Reporter, Summary, as_json
from heteropp.runtime.trainer import Trainer


def advance(trainer: Trainer, reporter: Reporter | None) -> StepMetrics | None:
    """Trains one step; returns its metrics on rank 0, which has a reporter, else None."""
    result, step_s = trainer.step()
    validation_loss = trainer.validate()
    key = f"metrics/{trainer.completed}"
    trainer.control.publish(key, trainer.reading.as_json())
    if reporter is None:
        return None
    readings = [Reading.of_json(text) for text in trainer.control.collect(key)]
    trainer.control.forget(key)
    learning_rate = trainer.run.hyperparameters.learning_rate_at(trainer.completed - 1)
    metrics = trainer.gauges.metrics(
        trainer.completed, result, learning_rate, validation_loss, step_s, readings
    )
    reporter.step(metrics)
    if slow := trainer.gauges.slow_ranks(readings):
        reporter.warn(slow)
    if warning := trainer.executor.guard.take_warning():
        reporter.warn(warning)
    return metrics


def finish(
    trainer: Trainer, reporter: Reporter | None, json_summary: bool = False
) -> Summary | None:
    """Writes what the run leaves, a trace of the median step too; rank 0 sums it up."""
    if trainer.spans:
        _trace(trainer, reporter)
    elif reporter:
        reporter.nothing_to_do()
    if reporter is None or (summary := reporter.finish()) is None:
        return None
    reporter.show(summary)
    if json_summary:
        print(as_json(summary), flush=True)
    return summary


def _trace(trainer: Trainer, reporter: Reporter | None) -> None:
    if reporter:
        by_time = sorted(trainer.spans, key=lambda step: step[1])
        trainer.control.store.set("traced step", str(by_time[len(by_time) // 2][0]))
    traced = int(trainer.control.store.get("traced step"))
    spans = next(spans for step, _, spans in trainer.spans if step == traced)
    trainer.control.publish("spans", json.dumps([asdict(span) for span in spans]))
    if not reporter:
        return
    texts = trainer.control.collect("spans")
    measured = [Span(**span) for text in texts for span in json.loads(text)]
    expected = trainer.gauges.expected
    predicted = expected.spans if expected else []
    reporter.trace(measured, predicted, list(trainer.run.labels))
