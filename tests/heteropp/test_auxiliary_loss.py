"""Routers' auxiliary loss is transformers' for each sequence by itself, over any stages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from layouts import MINISTAGES, SCHEDULES, plan_of, scheduled
from parity import TOLERANCE, Ranks
from sampled import sampled
from test_context_parallel import cut
from test_expert_parallel import LAYOUTS, alone
from test_parity import check
from test_slices import sliced
from tiny_decoders import tiny_config
from training_run import moved

from heteropp.description.plan import Plan, PlanError, Schedule
from heteropp.models.auxiliary_loss import AuxiliaryLoss, Routing
from heteropp.models.hugging_face.check import check as check_family
from heteropp.models.hugging_face.check import small_model
from heteropp.models.hugging_face.family import AUXILIARY_LOSS
from heteropp.models.hugging_face.model import HuggingFaceModel
from heteropp.models.hugging_face.reading import read
from heteropp.models.hugging_face.usual import usual_config
from heteropp.models.spec import ModelError
from heteropp.runtime.mixed_lengths.plans import by_length

ASKED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}  # so much that it shows


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


@cache
def decoder(family: str = "qwen3_moe", dtype: str = "float64") -> HuggingFaceModel:
    """Every second layer has experts."""
    values = tiny_config(family, layers=4, **ASKED).to_dict()
    return read(values, family, sequence_length=16, dtype=dtype)


# ---------------------------------------------------------------- the loss


def in_float64(function: Any) -> Any:
    """Returns transformers' function with float64 in the place of float32."""
    source = inspect.getsource(function).replace(".float()", ".double()")
    found: dict[str, Any] = {"torch": torch}
    exec(source.replace("torch.float32", "torch.float64"), found)
    return found[function.__name__]


def test_it_is_transformers_function_of_one_sequence() -> None:
    from transformers.models.mixtral import modeling_mixtral

    function = in_float64(modeling_mixtral.load_balancing_loss_func)
    sequences, tokens, experts, choices, layers = 3, 10, 8, 2, 4
    generator = torch.Generator().manual_seed(0)
    shape = (layers, sequences, tokens, experts)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    parts = torch.tensor([0.2, 0.3, 0.7])
    expected = 0.1 * torch.stack(
        [function(tuple(logits[:, i]), experts, choices) for i in range(sequences)]
    )
    (asked,) = torch.autograd.grad((expected * parts).sum(), logits)

    loss = AuxiliaryLoss(0.1, experts, choices, layers * tokens)
    routing = Routing(loss, sequences, 1.0, logits, torch.float64)
    weights = torch.ones(sequences * tokens, choices, dtype=torch.float64, requires_grad=True)
    passed = [routing.passed(weights, layer.flatten(0, 1)) for layer in logits]
    routing.gradients = parts.unsqueeze(1) * loss.gradients(routing.totals)
    (found,) = torch.autograd.grad(sum(each.sum() for each in passed), logits)
    assert torch.allclose(loss.of(routing.totals), expected, rtol=1e-12, atol=0)
    assert torch.allclose(found, asked, rtol=1e-12, atol=1e-18)


@pytest.mark.parametrize("family", sampled(AUXILIARY_LOSS, 4, everyday=2))
def test_every_familys_loss_and_gradients(family: str) -> None:
    """They are transformers' own in three stages, whose ranks may have parts of layers and rows."""
    values = {**usual_config(family)[0], **ASKED}
    for tp, sequence_parallel in ((1, False), (2, False), (2, True)):
        found = check_family(values, tp, sequence_parallel)
        assert found.passed, f"{tp} {sequence_parallel}: {found.explain()}"


# ---------------------------------------------------------------- over stages


FIRST = "unequal, then another"


@pytest.mark.parametrize(
    "layout", sampled([FIRST, *(name for name in LAYOUTS if name != FIRST)], 6)
)
def test_it_trains_what_one_device_does(ranks: Ranks, layout: str) -> None:
    plan = LAYOUTS[layout](decoder())
    check(ranks.train(plan), alone(ranks, plan), TOLERANCE["float64"])


def of_schedule(schedule: Schedule) -> Plan:
    plan = plan_of(decoder(), (2, 2), (2, 3), (1, 1), shares={0: (1, 3), 1: (1, 1, 2)})
    return scheduled(plan, schedule, MINISTAGES.get(schedule, 1))


@pytest.mark.parametrize(
    "schedule",
    sampled(["zb-v", *(s for s in SCHEDULES if s != "zb-v")], 3, everyday=1),
)
def test_every_schedule(ranks: Ranks, schedule: Schedule) -> None:
    """The second stage recomputes; Chimera's and ZB-V's stages hold layers at both ends."""
    plan = of_schedule(schedule)
    check(ranks.train(plan), alone(ranks, plan), TOLERANCE["float64"])


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.exhaustive)])
def test_slices_count_together(ranks: Ranks, schedule: Schedule) -> None:
    plan = plan_of(decoder(), (2, 1, 1), (2, 1, 1), (1, 2, 1))
    plan = sliced(replace(plan, schedule=schedule), (8, 6, 2))
    check(ranks.train(plan), alone(ranks, plan), TOLERANCE["float64"])


@pytest.mark.long
def test_messages_that_nothing_overlaps(ranks: Ranks) -> None:
    plan = replace(of_schedule("1f1b"), overlap=False)
    check(ranks.train(plan), alone(ranks, plan), TOLERANCE["float64"])


@pytest.mark.long
def test_two_pipelines(ranks: Ranks) -> None:
    one = plan_of(decoder(), (1, 3), (1, 1), (1, 1))
    (first,) = one.pipelines
    (second,) = plan_of(decoder(), (2, 1, 1), (1, 1, 1), (1, 1, 1)).pipelines
    second = replace(moved(second, 2), micro_batches=first.micro_batches)
    plan = replace(one, global_batch=2 * one.global_batch, pipelines=(first, second))
    (whole,) = plan_of(decoder(), (4,), (1,), (1,)).pipelines
    whole = replace(whole, micro_batches=2 * whole.micro_batches)
    expected = ranks.train(replace(plan, pipelines=(whole,)))
    check(ranks.train(plan), expected, TOLERANCE["float64"])


CUTS: dict[str, Callable[[HuggingFaceModel], Plan]] = {
    "rows": lambda m: plan_of(m, (2, 2), (1, 1), (2, 2), sequence_parallel=True),
    "tokens": lambda m: cut(plan_of(m, (2, 2), (1, 1), (1, 2)), {1: [(10, 6)]}),
}


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(
    "family", ["gpt_oss", pytest.param("mixtral", marks=pytest.mark.exhaustive)]
)
def test_steps_are_transformers(ranks: Ranks, family: str, cuts: str) -> None:
    """Steps and validation, in which a sequence's loss is what transformers says of it alone."""
    plan = CUTS[cuts](decoder(family))
    got, plain = ranks.train(plan), ranks.plainly(plan)
    assert got.losses == pytest.approx(plain.losses, rel=1e-6)
    assert got.norms == pytest.approx(plain.norms, rel=1e-5)
    assert got.validation_loss == pytest.approx(plain.validation_loss, rel=1e-6)


# ---------------------------------------------------------------- what is said


def test_a_family_with_a_loss_of_its_own_is_one_sentence() -> None:
    with pytest.raises(ModelError, match="as the auxiliary loss of doge is not trained; that of"):
        small_model({**usual_config("doge")[0], **ASKED})


def test_padding_does_not_go_with_it() -> None:
    plan = plan_of(decoder(), (4,), (1,), (1,))
    with pytest.raises(PlanError, match="padding would count in the auxiliary loss"):
        by_length([plan, plan_of(replace(decoder(), sequence_length=32), (4,), (1,), (1,))])
