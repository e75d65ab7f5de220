"""Schedules of the learning rate, and groups of parameters, against torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import plan_of
from parity import TOLERANCE, Ranks
from plain_llama import decaying
from sampled import sampled
from test_own_model import check, own_model
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR
from training_run import make_plan, tiny_model, write_text

import heteropp
from heteropp.description.hyperparameters import HyperparameterError, Hyperparameters
from heteropp.description.plan import write_plan
from heteropp.models.gpt2.model import GPT2Model

RATE, WARMUP, END, COOLDOWN, MINIMUM = 3e-3, 4, 25, 6, 0.05


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


def after_the_warm_up(name: str, optimizer: Any) -> list[Any]:
    """torch's schedulers, and the steps at which all but the first begin."""
    down = {"start_factor": 1.0, "end_factor": MINIMUM}
    if name == "cosine":
        return [CosineAnnealingLR(optimizer, END - WARMUP, RATE * MINIMUM)]
    if name == "linear":
        return [LinearLR(optimizer, **down, total_iters=END - WARMUP)]
    if name == "constant":
        return [ConstantLR(optimizer, factor=1.0)]
    return [ConstantLR(optimizer, factor=1.0), LinearLR(optimizer, **down, total_iters=COOLDOWN)]


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd"])
def test_a_schedule_is_torch_s(name: str) -> None:
    settings = Hyperparameters(
        learning_rate=RATE,
        learning_rate_schedule=name,  # type: ignore[arg-type]
        warmup_steps=WARMUP,
        decay_steps=END,
        cooldown_steps=COOLDOWN if name == "wsd" else None,
        minimum_ratio=MINIMUM,
    )
    settings.validate()
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=RATE)
    # ours reaches the highest rate in the warm-up's last step, torch's in the one after it
    warmup = LinearLR(optimizer, start_factor=1 / WARMUP, total_iters=WARMUP - 1)
    scheduler = SequentialLR(
        optimizer,
        [warmup, *after_the_warm_up(name, optimizer)],
        [WARMUP, END - COOLDOWN][: 2 if name == "wsd" else 1],
    )
    for step in range(END + 1):
        expected = optimizer.param_groups[0]["lr"]
        assert settings.learning_rate_at(step) == pytest.approx(expected, rel=1e-9), step
        optimizer.step()
        scheduler.step()
    last = RATE if name == "constant" else RATE * MINIMUM
    assert settings.learning_rate_at(10 * END) == pytest.approx(last)


def test_wsd_cools_down_in_a_tenth_of_the_steps_unless_told() -> None:
    settings = Hyperparameters(learning_rate_schedule="wsd", warmup_steps=0, decay_steps=50)
    assert [settings.learning_rate_at(step) == 1e-3 for step in (44, 45, 46)] == [True, True, False]


GPT2 = GPT2Model(
    family="gpt2", name="tiny", layers=2, hidden=32, heads=4, intermediate=64, vocab=256,
    positions=16, sequence_length=16,
)  # fmt: skip


@pytest.mark.parametrize("model", [tiny_model, lambda: GPT2, own_model])
def test_norms_and_biases_have_no_weight_decay(model: Callable[[], Any]) -> None:
    settings, kinds = Hyperparameters(weight_decay=0.2), set()
    for parameter in model().parameters():
        vector = "norm" in parameter.name or parameter.name.endswith("bias")
        free = vector or parameter.name == "embedding.positions"  # which its model says
        expected = 0.0 if free else 0.2
        assert settings.of(parameter, parameter.name) == (1.0, expected), parameter.name
        kinds.add(vector)
    assert kinds == {True, False}


GROUPS = ("embedding*:learning_rate=0.1x", "layers.[02].mlp*:learning_rate=3x,weight_decay=0.4")
GROUPS += ("*norm*:weight_decay=0.3", "layers.0.*:weight_decay=7")  # the first that fits counts


def in_groups(model: Any, module: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """What GROUPS says, written as torch's groups."""
    decays = {id(p) for p in decaying(model, module)[0]["params"]}
    groups = []
    for name, parameter in module.named_parameters():
        factor, decay = 1.0, 0.1 if id(parameter) in decays else 0.0
        if name.startswith("embedding"):
            factor = 0.1
        elif name.startswith(("layers.0.mlp", "layers.2.mlp")):
            factor, decay = 3.0, 0.4
        elif "norm" in name:
            decay = 0.3
        elif name.startswith("layers.0."):
            decay = 7.0
        groups.append({"params": [parameter], "factor": factor, "weight_decay": decay})
    return [torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)]


@pytest.mark.parametrize(
    ("dp", "tp", "zero_stage"),
    sampled([((1, 2), (2, 1), 2), ((3, 1), (1, 2), 1), ((2, 1), (1, 2), 0)], 2, everyday=1),
)
def test_groups_are_updated_as_torch_s_are(
    ranks: Ranks, dp: tuple[int, ...], tp: tuple[int, ...], zero_stage: int
) -> None:
    shares = {0: (1, 2, 1)} if dp[0] == 3 else None
    model = tiny_model(dtype="float64")
    plan = plan_of(model, (1, 3), dp, tp, zero_stage=zero_stage, shares=shares)
    got = ranks.train(plan, settings={"groups": GROUPS})
    check(got, ranks.plainly(plan, optimizers_of=in_groups), TOLERANCE["float64"])


def test_a_group_that_cannot_be_is_one_sentence() -> None:
    for text, expected in (
        ("embedding*", "has no pattern or no settings; expected PATTERN:SETTING=VALUE"),
        (":learning_rate=2x", "has no pattern"),
        ("e*:momentum=1", "has setting 'momentum'; expected learning_rate or weight_decay"),
        ("e*:learning_rate=2", "has learning_rate '2'; expected a multiple"),
        ("e*:learning_rate=-1x", "has learning_rate '-1x'"),
        ("e*:weight_decay=x", "has weight_decay 'x'; expected 0 to 100"),
        ("e*:weight_decay=1,weight_decay=2", "has setting weight_decay twice"),
    ):
        with pytest.raises(HyperparameterError) as error:
            Hyperparameters(groups=(text,)).validate()
        assert expected in str(error.value) and "\n" not in str(error.value)


def test_bad_settings_are_refused_before_anything_starts(tmp_path: Path) -> None:
    plan = make_plan(tiny_model(), (4,), (1,), (1,), (False,))
    write_plan(plan, tmp_path / "plan.json")
    for options, expected in (
        ({"group": ["layer.*:weight_decay=0"]}, "group layer.*:weight_decay=0 fits no parameter"),
        ({"learning_rate_schedule": "step"}, "expected one of cosine, linear, constant, wsd"),
        ({"minimum_ratio": 2.0}, "minimum_ratio is 2.0; expected 0 to 1"),
        ({"cooldown_steps": 3}, "which schedule wsd alone has"),
        (
            {"learning_rate_schedule": "wsd", "steps": 20, "warmup_steps": 19},
            "the learning rate's stable part ends at step 18",
        ),
    ):
        given: dict[str, Any] = options
        with pytest.raises((HyperparameterError, heteropp.InputError), match=expected[:20]) as e:
            heteropp.train(tmp_path / "plan.json", device="cpu", output=tmp_path / "run", **given)
        assert expected in str(e.value)
        assert not (tmp_path / "run").exists()


@pytest.mark.exhaustive
def test_a_resumed_run_keeps_its_schedule_and_groups(tmp_path: Path) -> None:
    """Bit for bit what a run without a stop does; other settings are refused."""
    plan = plan_of(tiny_model(), (2, 2), (2, 1), (1, 1))
    write_plan(plan, tmp_path / "plan.json")
    write_text(tmp_path / "text")
    settings: dict[str, Any] = {
        "learning_rate_schedule": "wsd", "warmup_steps": 2, "decay_steps": 6, "cooldown_steps": 3,
        "minimum_ratio": 0.2, "group": ["head*:learning_rate=0.5x"], "data": tmp_path / "text",
        "device": "cpu",
    }  # fmt: skip

    def parameters(run: str, step: int) -> list[bytes]:
        folder = tmp_path / run / "checkpoints" / f"step-{step:06d}"
        return [file.read_bytes() for file in sorted(folder.glob("*.safetensors"))]

    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    heteropp.train(tmp_path / "plan.json", output=whole, steps=6, **settings)
    heteropp.train(tmp_path / "plan.json", output=stopped, steps=4, **settings)
    heteropp.train(output=stopped, resume=True, steps=6)
    assert parameters("stopped", 6) == parameters("whole", 6)
    with pytest.raises(heteropp.InputError, match="was made with groups"):
        heteropp.train(output=stopped, resume=True, steps=8, group=["head*:learning_rate=2x"])
