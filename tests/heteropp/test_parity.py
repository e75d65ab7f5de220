"""A plan trains what a plain single process trains: losses, gradient norms, every parameter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from layouts import EXACT, LAYOUTS, SCHEDULES, lay_out, plan_of, scheduled, turn
from parity import STEPS, TOLERANCE, Ranks, Trained
from plain_llama import train_plainly
from sampled import sampled
from training_run import Training, checkpoint_parameters, tiny_model

from heteropp.data.source import open_tokens
from heteropp.description.plan import Schedule


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


def check(got: Trained, plain: Trained, tolerance: float) -> None:
    assert got.losses == pytest.approx(plain.losses, rel=tolerance)
    assert got.norms == pytest.approx(plain.norms, rel=tolerance)
    assert got.validation_loss == pytest.approx(plain.validation_loss, rel=tolerance)
    assert got.parameters.keys() == plain.parameters.keys()
    for name, expected in plain.parameters.items():
        error = (got.parameters[name] - expected).abs().max() / expected.abs().max()
        assert error <= tolerance, f"{name}: {error:.3g}"


IN_FLOAT32 = ("without overlap",)  # every day


def marks(layout: str, schedule: Schedule) -> tuple[pytest.MarkDecorator, ...]:
    number = list(LAYOUTS).index(layout)
    if turn(layout, schedule) or (number >= len(SCHEDULES) and number % 2):
        return (pytest.mark.exhaustive,)
    return () if number < len(SCHEDULES) else (pytest.mark.long,)  # every day, every schedule once


CASES = [
    pytest.param(s, layout, marks=marks(layout, s))
    for layout in LAYOUTS
    for s in SCHEDULES
    if lay_out(layout, s, "float64")
]


@pytest.mark.parametrize(("schedule", "layout"), CASES)
def test_every_schedule_on_every_layout(ranks: Ranks, schedule: Schedule, layout: str) -> None:
    plan = lay_out(layout, schedule, "float64")
    assert plan is not None
    check(ranks.train(plan), ranks.plainly(plan), TOLERANCE["float64"])


@pytest.mark.parametrize(
    "layout",
    [
        *IN_FLOAT32,
        *sampled((layout for layout in LAYOUTS if layout not in IN_FLOAT32), 10),
    ],
)
def test_every_layout_in_float32(ranks: Ranks, layout: str) -> None:
    plan = lay_out(layout, "1f1b", "float32")
    assert plan is not None
    check(ranks.train(plan), ranks.plainly(plan), TOLERANCE["float32"])


EXACT_MARKS = [(), pytest.mark.long, *[pytest.mark.exhaustive] * 4]


@pytest.mark.parametrize(
    ("schedule", "layout"),
    [
        pytest.param(schedule, layout, marks=EXACT_MARKS[(s + e) % len(EXACT_MARKS)])
        for e, layout in enumerate(EXACT)
        for s, schedule in enumerate(SCHEDULES)
        if schedule != "chimera"
    ],
)
def test_ranks_alone_equal_the_plain_loop_bit_for_bit(
    ranks: Ranks, schedule: Schedule, layout: str
) -> None:
    """But for Chimera's, which sum the gradients of two copies."""
    plan = lay_out(layout, schedule, "float32")
    assert plan is not None
    got, plain = ranks.train(plan), ranks.plainly(plan)
    assert got.losses == plain.losses
    assert got.norms == plain.norms
    for name, expected in plain.parameters.items():
        assert torch.equal(got.parameters[name], expected), name


def test_unlike_numbers_of_ministages(ranks: Ranks) -> None:
    """Zorse's GPipe: a stage in as many ministages as its memory asks for."""
    model = tiny_model(layers=8, dtype="float64")
    plan = scheduled(plan_of(model, (2, 4, 2), (1, 2, 1), (2, 1, 1)), "gpipe", 1, 4, 2)
    check(ranks.train(plan), ranks.plainly(plan), TOLERANCE["float64"])


@pytest.mark.exhaustive
def test_300_steps(ranks: Ranks) -> None:
    """The mean relative error of the loss, in float32."""
    model = tiny_model(layers=2, hidden=16, heads=2, intermediate=32, sequence_length=8)
    plan = scheduled(plan_of(model, (1, 1), (2, 1), (1, 2)), "zb-h1", 1)
    got, plain = ranks.train(plan, 300), ranks.plainly(plan, 300)
    assert len(got.losses) == 300 and got.losses[-1] < got.losses[0]
    pairs = zip(got.losses, plain.losses, strict=True)
    assert sum(abs(a / b - 1) for a, b in pairs) / 300 <= 1e-5


@pytest.mark.parametrize(
    "schedule",
    sampled(SCHEDULES, 3, everyday=1),
)
def test_a_layer_runs_once_more_for_each_micro_batch_where_it_is_recomputed(
    ranks: Ranks, schedule: Schedule
) -> None:
    plan = lay_out("four stages", schedule, "float64")
    assert plan is not None
    forwards = ranks.train(plan).forwards
    times: dict[str, int] = {}
    for rank, own in enumerate(forwards):
        again = 1 + plan.pipelines[0].stages[rank].recompute
        for layer, count in own.items():
            assert count % (again * STEPS) == 0
            times[layer] = times.get(layer, 0) + count // again
    micro_batches = plan.pipelines[0].micro_batches
    assert times == {f"layers.{layer}": STEPS * micro_batches for layer in range(8)}


def test_the_command_trains_on_emulated_chips(tmp_path: Path) -> None:
    """Training over dicomm gives plain training's losses, and its parameters in the checkpoint."""
    plan = plan_of(tiny_model(dtype="float64"), (2, 2), (2, 1), (1, 2))
    settings = ("--learning-rate", "3e-3", "--gradient-clip", "0.3", "--warmup-steps", "2")
    training = Training(tmp_path, plan, "--steps", str(STEPS), *settings).finish()
    tokens = open_tokens(tmp_path / "text", tmp_path / "cache" / "hyperhetero")
    losses, _, parameters = train_plainly(plan.model, tokens, STEPS, 4, 4, 3e-3, 2, 0.3)
    assert training.losses == pytest.approx(losses, rel=1e-12)
    trained = checkpoint_parameters(training.output / "checkpoints" / f"step-{STEPS:06d}")
    for name, expected in parameters.items():
        error = (trained[name] - expected).abs().max() / expected.abs().max()
        assert error <= 1e-12, f"{name}: {error:.3g}"
