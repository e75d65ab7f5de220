"""Routers' biases are moved by the loads of the whole batch, wherever its tokens and layers lie."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import MINISTAGES, plan_of, scheduled
from parity import STEPS, Ranks, Trained
from plain_llama import adamw
from sampled import sampled
from test_context_parallel import cut
from test_expert_parallel import decoder, spread
from test_slices import sliced
from torch import Tensor, nn
from training_run import moved, tiny_model

from heteropp.api.errors import InputError
from heteropp.api.training.checks import chosen_hyperparameters
from heteropp.description.plan import Plan
from heteropp.layout.boxes import Box
from heteropp.models.hugging_face.check import small_model
from heteropp.models.hugging_face.model import HuggingFaceModel
from heteropp.models.hugging_face.usual import usual_config
from heteropp.models.parallel.tensor_parallel import SoloGroup
from heteropp.state.checkpoint.manifest import find
from heteropp.state.checkpoint.reader import Reader

RATE = 0.01  # so large that some tokens go elsewhere after a step
SETTINGS = {"expert_bias_update_rate": RATE}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


class Balancing:
    """The formula of DeepSeek-V3, section 2.1.2, on transformers' own model, as its loop calls it
    after each step.
    """

    param_groups: tuple = ()

    def __init__(self, module: nn.Module) -> None:
        self.loads: dict[nn.Module, Tensor] = {}
        for router in module.modules():
            if hasattr(router, "e_score_correction_bias"):
                self.loads[router] = torch.zeros(len(router.e_score_correction_bias)).double()
                router.register_forward_hook(self._count)

    def _count(self, router: nn.Module, _: Any, result: tuple[Tensor, ...]) -> None:
        for expert in result[2].flatten().tolist():
            self.loads[router][expert] += 1

    def step(self) -> None:
        for router, load in self.loads.items():
            router.e_score_correction_bias += RATE * (load.mean() - load).sign()
            load.zero_()


def with_balancing(model: Any, module: nn.Module) -> list:
    return [*adamw(model, module), Balancing(module)]


def biases(trained: Trained) -> dict[str, Tensor]:
    return {n: v for n, v in trained.parameters.items() if n.endswith("e_score_correction_bias")}


def check(got: Trained, expected: Trained) -> None:
    """Routers are in float32, and so losses may differ by its rounding; biases must not."""
    assert got.losses == pytest.approx(expected.losses, rel=1e-7)
    assert got.norms == pytest.approx(expected.norms, rel=1e-6)
    assert len(biases(expected)) == 3
    assert max(bias.abs().max() for bias in biases(expected).values()) > 2 * RATE
    for name, bias in biases(expected).items():
        assert torch.equal(biases(got)[name], bias), name


LAYOUTS: dict[str, Callable[[HuggingFaceModel], Plan]] = {
    "ep beside tp": lambda m: spread(
        plan_of(m, (2, 2), (2, 1), (1, 2), shares={0: (1, 3)}), {0: (3, 1)}
    ),
    "cp, ZeRO-2": lambda m: cut(plan_of(m, (2, 2), (1, 1), (2, 1), zero_stage=2), {0: [(10, 6)]}),
    "sequence parallel": lambda m: plan_of(m, (2, 2), (2, 1), (1, 2), sequence_parallel=True),
    "ZeRO-0": lambda m: plan_of(m, (3, 1), (2, 1), (1, 1), zero_stage=0),
    "slices": lambda m: sliced(plan_of(m, (2, 2), (2, 1), (1, 2)), (10, 6)),
    "two pipelines": lambda m: _two_pipelines(m),
    **{
        schedule: lambda m, schedule=schedule: scheduled(
            plan_of(m, (2, 2), (1, 2), (1, 1)), schedule, MINISTAGES.get(schedule, 1)
        )
        for schedule in ("interleaved-1f1b", "zb-h1", "zb-v", "chimera")
    },
}


def _two_pipelines(model: HuggingFaceModel) -> Plan:
    one = plan_of(model, (3, 1), (1, 1), (1, 1))
    (first,) = one.pipelines
    # all of whose tensor-parallel ranks see all rows of their blocks' experts
    (second,) = plan_of(model, (2, 2), (1, 1), (2, 1), sequence_parallel=True).pipelines
    second = replace(moved(second, 2), micro_batches=1)
    return replace(
        one, global_batch=one.micro_batch * (first.micro_batches + 1), pipelines=(first, second)
    )


EVERYDAY = ("ep beside tp", "zb-v")


@pytest.mark.parametrize(
    "layout",
    [*EVERYDAY, *sampled((n for n in LAYOUTS if n not in EVERYDAY), 9)],
)
def test_loads_are_those_of_the_whole_batch(ranks: Ranks, layout: str) -> None:
    """Second stages recompute, and steps are followed by validation: neither counts twice."""
    plan = LAYOUTS[layout](decoder("deepseek_v3"))
    plain = ranks.plainly(plan, optimizers_of=with_balancing)
    check(ranks.train(plan, settings=SETTINGS), plain)


@pytest.mark.long
def test_a_resumed_run_is_the_same(ranks: Ranks, tmp_path: Path) -> None:
    """The bias is part of the state, and goes on in another layout, too."""
    plan = LAYOUTS["ep beside tp"](decoder("deepseek_v3"))
    one, other = tmp_path / "one", tmp_path / "other"
    whole = ranks.train(plan, settings=SETTINGS)
    ranks.train(plan, 2, one, settings=SETTINGS)
    shutil.copytree(one, other)
    resumed = ranks.train(plan, STEPS, one, settings=SETTINGS)
    assert all(torch.equal(resumed.parameters[n], value) for n, value in whole.parameters.items())
    assert resumed.losses == whole.losses[2:]
    elsewhere = ranks.train(LAYOUTS["zb-v"](plan.model), STEPS, other, settings=SETTINGS)
    assert all(torch.equal(biases(elsewhere)[n], bias) for n, bias in biases(whole).items())


def test_a_model_of_16_bits_loses_no_step(ranks: Ranks, tmp_path: Path) -> None:
    """The state has the bias in float32, in which steps add up that bfloat16 has no room for."""
    model = decoder("deepseek_v3", "bfloat16")
    plan = plan_of(model, (2, 2), (1, 1), (1, 1))
    ranks.train(plan, STEPS, tmp_path, settings={"expert_bias_update_rate": 1e-3})
    checkpoint = find(tmp_path)
    assert checkpoint is not None
    for parameter in filter(model.is_expert_bias, model.parameters()):
        bias = Reader(checkpoint).read("value", parameter.name, Box.whole(parameter.shape))
        steps = bias.double() / 1e-3
        assert bias.dtype == torch.float32
        assert (steps - steps.round()).abs().max() < 1e-3
        assert steps.abs().max() > 2


@pytest.mark.parametrize(
    "family", ["deepseek_v3", "ernie4_5_moe", "lfm2_moe", "minimax_m2", "laguna", "glm4_moe"]
)
def test_every_familys_routers_count_what_they_send(family: str) -> None:
    model = small_model(usual_config(family)[0])
    stage = model.build((0, model.layers), SoloGroup(), "cpu", torch.float64)
    stage.initialise(0)
    stage.count_expert_loads()
    tokens = torch.arange(2 * model.sequence_length) % model.vocab
    stage(tokens, tokens)
    with torch.no_grad():
        stage(tokens, tokens)  # as before a recompute, or in validation
    assert stage.expert_loads
    for name, load in stage.expert_loads.items():
        assert load.sum() == len(tokens) * model.experts_of_token, name


def test_a_model_without_such_a_bias_is_one_sentence() -> None:
    for model, said in ((tiny_model(), "tiny"), (decoder(), "qwen3_moe")):
        plan = plan_of(model, (model.layers,), (1,), (1,))
        message = (
            f"--expert-bias-update-rate is 0.01, but model {said} has no router with a bias that "
            "trains; expected 0"
        )
        with pytest.raises(InputError, match=re.escape(message)):
            chosen_hyperparameters(None, 5, SETTINGS, plan)
