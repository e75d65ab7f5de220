"""The step loop of every training, under torchrun or elastic, and what a run leaves at its end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

from heteropp.description.timeline import Span
from heteropp.runtime.measuring.gauges import Reading
from heteropp.runtime.measuring.metrics import StepMetrics
from heteropp.runtime.measuring.report import Reporter, Summary, TracedStep, as_json
from heteropp.runtime.trainer import Trainer
from heteropp.state.checkpoint.writer import Writer

TRACED_LIVE = (2, 8, 32, 128, 512, 2048, 8192)  # steps after a start, whose trace replaces the last
LAST_STEP = "last step"  # announced by rank 0 when the job is told to stop


def train(
    trainer: Trainer,
    reporter: Reporter | None,
    writer: Writer,
    before_step: Callable[[], None],
    after_step: Callable[[StepMetrics | None], bool] = lambda _: False,
) -> None:
    """Trains and saves until the run's last step, or an earlier one that ends it.

    before_step: is called on rank 0 alone, which may `stop_after_next_step`.
    after_step: is called on every rank with the step's metrics, which only rank 0 has; every rank
    returns the same: whether the training under this plan ends here.
    """
    run, control = trainer.run, trainer.control
    while trainer.completed < run.steps:
        if control.rank == 0:
            before_step()
        metrics = advance(trainer, reporter)
        # no rank ends a step before rank 0 has given its part of the norm to it, so that at the end
        # of a step all of them know what rank 0 announced before it
        last_step = min(run.steps, int(control.announced(LAST_STEP) or run.steps))
        last = trainer.completed == last_step
        if last or (run.checkpoint_every and trainer.completed % run.checkpoint_every == 0):
            trainer.save(writer)
        if after_step(metrics) or last:
            return


def stop_after_next_step(trainer: Trainer) -> None:
    """Lets every rank save and stop after the step that is about to begin; rank 0 calls it."""
    if not trainer.control.announced(LAST_STEP):
        trainer.control.announce(LAST_STEP, str(trainer.completed + 1))


def advance(trainer: Trainer, reporter: Reporter | None) -> StepMetrics | None:
    """Trains one step; returns its metrics on rank 0, which has a reporter, else None."""
    result = trainer.step()
    validation = trainer.validate()
    # rank 0 gives its part of the norm to a step only when it has all of the step before
    trainer.control.withdraw(_metrics(trainer.completed - 1))
    trainer.control.publish(_metrics(trainer.completed), trainer.reading.as_json())
    if trainer.steps_here in TRACED_LIVE:
        _trace(trainer, reporter, trainer.completed, f"spans of {trainer.completed}")
    if reporter is None:
        return None
    texts = trainer.control.collect(_metrics(trainer.completed))
    readings = [Reading.of_json(text) for text in texts]
    learning_rate = trainer.run.hyperparameters.learning_rate_at(trainer.completed - 1)
    metrics = trainer.gauges.metrics(trainer.completed, result, learning_rate, validation, readings)
    reporter.step(metrics)
    if slow := trainer.gauges.slow_ranks(readings):
        reporter.warn(slow, "straggler")
    if warning := trainer.executor.guard.take_warning():
        reporter.warn(warning)
    return metrics


def _metrics(step: int) -> str:
    return f"metrics/{step}"


def finish(
    trainer: Trainer, reporter: Reporter | None, json_summary: bool = False
) -> Summary | None:
    """Writes what the run leaves, a trace of the median step too; rank 0 sums it up."""
    if trainer.spans:
        if reporter:
            by_time = sorted(trainer.spans, key=lambda step: step[1])
            trainer.control.announce("traced step", str(by_time[len(by_time) // 2][0]))
        traced = _trace(trainer, reporter, int(trainer.control.hear("traced step")), "spans")
        if reporter and traced:
            reporter.draw(traced, trainer.run.labels)
    elif reporter:
        reporter.nothing_to_do()
    if reporter is None or (summary := reporter.finish()) is None:
        return None
    reporter.show(summary)
    if json_summary:
        print(as_json(summary), flush=True)
    return summary


def _trace(trainer: Trainer, reporter: Reporter | None, number: int, key: str) -> TracedStep | None:
    """Leaves a trace of one of the newest steps; returns the step on rank 0. key: a new one."""
    spans = next(spans for step, _, spans in trainer.spans if step == number)
    trainer.control.publish(key, json.dumps([asdict(span) for span in spans]))
    if not reporter:
        return None
    texts = trainer.control.collect(key)
    trainer.control.forget(key)
    expected = trainer.gauges.expected
    step = TracedStep(
        number=number,
        measured=[Span(**span) for text in texts for span in json.loads(text)],
        predicted=expected.spans if expected else [],
        memory=expected.memory if expected else {},
    )
    plan = None if trainer.run.by_length else trainer.run.plan
    reporter.trace(plan, step, trainer.run.labels)
    return step
