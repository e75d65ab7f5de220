"""A plan trains what a plain single process trains: losses, gradient norms, every parameter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from plain_llama import train_plainly
from training_run import Training, checkpoint_parameters, make_plan, tiny_model

from heteropp.model import Model
from heteropp.plan import Plan
from heteropp.training.data import open_tokens

STEPS, WARMUP, CLIP = 5, 2, 0.3
# Adam divides by the gradient's own size: where a gradient nearly cancels, its float32 noise comes
# out times the learning rate, so a high rate would test Adam's conditioning and not the layout
RATE = {"float32": 2e-5, "float64": 3e-3}
TOLERANCE = {"float32": 2e-6, "float64": 1e-12}


def run_both(folder: Path, plan: Plan) -> tuple[tuple, tuple]:
    """(losses, gradient norms, parameters) of the plan's run and of the plain loop."""
    training = Training(
        folder,
        plan,
        *("--steps", str(STEPS), "--warmup-steps", str(WARMUP)),
        *("--learning-rate", str(RATE[plan.model.dtype]), "--gradient-clip", str(CLIP)),
    ).finish()
    ours = (
        training.losses,
        [metrics["gradient_norm"] for metrics in training.metrics],
        checkpoint_parameters(plan, training.output / "checkpoints" / f"step-{STEPS:06d}"),
    )
    tokens = open_tokens(folder / "text", folder / "cache" / "hyperhetero")
    plain = train_plainly(
        plan.model,
        tokens,
        STEPS,
        plan.micro_batch,
        plan.pipelines[0].micro_batches,
        RATE[plan.model.dtype],
        WARMUP,
        CLIP,
    )
    assert all(norm > CLIP for norm in plain[1]), "clipping must be active"
    assert ours[2].keys() == plain[2].keys()
    return ours, plain


def check_close(folder: Path, plan: Plan) -> None:
    (losses, norms, parameters), (plain_losses, plain_norms, plain) = run_both(folder, plan)
    tolerance = TOLERANCE[plan.model.dtype]
    assert losses == pytest.approx(plain_losses, rel=tolerance)
    assert norms == pytest.approx(plain_norms, rel=tolerance)
    for name, expected in plain.items():
        error = (parameters[name] - expected).abs().max() / expected.abs().max()
        assert error <= tolerance, f"{name}: {error:.3g}"


@pytest.mark.parametrize("recompute", [(False, False, False), (False, True, True)])
def test_three_stages_alone_equal_the_plain_loop_bit_for_bit(
    tmp_path: Path, recompute: tuple[bool, ...]
) -> None:
    plan = make_plan(tiny_model(), (1, 2, 1), (1, 1, 1), (1, 1, 1), recompute)
    (losses, norms, parameters), (plain_losses, plain_norms, plain) = run_both(tmp_path, plan)
    assert losses == plain_losses
    assert norms == plain_norms
    for name, expected in plain.items():
        assert torch.equal(parameters[name], expected), name


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_unlike_degrees_between_stages(tmp_path: Path, dtype: str) -> None:
    model = tiny_model(dtype=dtype)
    check_close(tmp_path, make_plan(model, (1, 2, 1), (2, 1, 1), (1, 2, 1), (True, False, False)))


def figure_8(model: Model) -> Plan:
    """The paper's example: 16 chips A and 4 chips B in three stages, with half its layers."""
    return make_plan(model, (4, 3, 2), (4, 2, 2), (2, 4, 2), (True, False, False))


def test_figure_8(tmp_path: Path) -> None:
    check_close(tmp_path, figure_8(tiny_model(layers=9, kv_heads=4, dtype="float64")))


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_replicas_with_unequal_shares(tmp_path: Path, zero_stage: int) -> None:
    plan = make_plan(
        tiny_model(), (3, 1), (2, 1), (1, 2), (False, True), micro_batch=4, zero_stage=zero_stage
    )
    check_close(tmp_path, with_shares(plan, (1, 3)))


def with_shares(plan: Plan, shares: tuple[int, ...]) -> Plan:
    from dataclasses import replace

    pipeline = plan.pipelines[0]
    replicas = tuple(
        replace(replica, batch_share=share)
        for replica, share in zip(pipeline.stages[0].replicas, shares, strict=True)
    )
    stages = (replace(pipeline.stages[0], replicas=replicas), *pipeline.stages[1:])
    return replace(plan, pipelines=(replace(pipeline, stages=stages),))
