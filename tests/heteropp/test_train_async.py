"""Training on chips that compute behind the host's back: the bits of chips that do not."""

from __future__ import annotations

from pathlib import Path

import async_chip
import pytest
from sampled import sampled
from training_run import Training, make_plan, several_pipelines, tiny_model

from heteropp.description.plan import Plan

PLANS = {
    "pipeline": make_plan(tiny_model(), (3, 1), (2, 1), (1, 1), (True, False)),
    "tensor parallel": make_plan(tiny_model(), (2, 2), (1, 1), (2, 1), (False, True)),
    "pipelines": several_pipelines(
        tiny_model(), ((2, 2), (1, 1), (1, 1), 2), ((3, 1), (1, 1), (1, 1), 2)
    ),
}


def losses(folder: Path, plan: Plan, *arguments: str) -> list[float]:
    folder.mkdir()
    steps = ("--steps", "3", "--p2p", "cpu-mediated")
    return Training(folder, plan, *steps, *arguments).finish().losses


@pytest.mark.parametrize("name", sampled(PLANS, 3))
def test_losses_on_late_chips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    expected = losses(tmp_path / "emulated", PLANS[name])
    monkeypatch.setenv("DITORCH_VENDOR", "library")
    monkeypatch.setenv("DICOMM_STRATEGY", "cpu-mediated")
    for seed in (1, 2):
        for key, value in async_chip.environment(seed, kernels=False).items():
            monkeypatch.setenv(key, value)
        assert losses(tmp_path / f"late {seed}", PLANS[name]) == expected
