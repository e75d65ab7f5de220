"""What ranks compute while rows are on their way between them and the ranks with their experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import pairwise, product
from typing import Any

import hspmd_ranks
import pytest
import torch
import torch.distributed as dist
from layouts import plan_of, scheduled
from parity import Ranks
from sampled import sampled
from test_expert_parallel import LAYOUTS, alone, decoder, on, spread
from test_memory import check as check_memory
from test_memory import chip
from tiny_decoders import tiny_config
from torch import Tensor

from heteropp.description.plan import Plan
from heteropp.models.hugging_face.model import HuggingFaceModel
from heteropp.models.hugging_face.reading import read
from heteropp.models.parallel.backward import backward
from heteropp.models.parallel.expert_parallel import ExpertProcessGroup, UnderWay
from heteropp.models.parallel.tensor_parallel import SoloGroup
from heteropp.models.stage_module import StageModule

FAMILY = "deepseek_v3"  # whose blocks have shared experts


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


def halved(plan: Plan) -> Plan:
    return scheduled(plan, "zb-h1", 1)


@pytest.mark.parametrize(
    ("layout", "of"),
    sampled(
        product(["unequal, then another", "sequence parallel", "with tp"], [halved, lambda p: p]), 6
    ),
)
def test_shared_experts_train_what_one_device_does(
    ranks: Ranks, layout: str, of: Callable[[Plan], Plan]
) -> None:
    """The second stage recomputes. The family's routers and norms are in float32, so that other
    sums of float64 come out as another float32.
    """
    plan = of(LAYOUTS[layout](decoder(FAMILY)))
    got, expected = ranks.train(plan), alone(ranks, plan)
    assert got.losses == pytest.approx(expected.losses, rel=1e-10)
    assert got.norms == pytest.approx(expected.norms, rel=1e-8)


# ---------------------------------------------------------------- what runs meanwhile


class Late(ExpertProcessGroup):
    """Sends what another rank waits for only once that rank has done what it can do meanwhile."""

    def __init__(self, store: dist.Store, awaited: list[str], *given: Any) -> None:
        super().__init__(*given)
        self.store, self.awaited = store, awaited

    def start(self, *given: Any) -> UnderWay:
        self.store.wait([self.awaited.pop(0)], timedelta(seconds=60))
        return super().start(*given)


def block(group: ExpertProcessGroup | None) -> StageModule:
    """Returns a block with some experts, or all of them; its weights are always the same."""
    model = decoder(FAMILY, layers=3)
    stage = model.build((1, 2), SoloGroup(), "cpu", torch.float64, experts=group)
    first, last = (0, 4) if group is None else group.parts[group.index]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            if ".experts." in name:
                shape = 4, *parameter.shape[1:]
                parameter.copy_(torch.randn(shape, generator=generator)[first:last])
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return stage


def ran(stage: StageModule, x: Tensor) -> list[Tensor]:
    """Adds the gradients of a block's weights; returns its result and the gradient of x."""
    x = x.clone().requires_grad_()
    result = stage(x)
    backward(result, torch.ones_like(result))
    assert x.grad is not None
    return [result, x.grad]


def gradients(stage: StageModule, of_experts: bool) -> list[Tensor]:
    found = [p.grad for n, p in stage.named_parameters() if (".experts." in n) == of_experts]
    return [gradient for gradient in found if gradient is not None]  # what does not train has none


def meet(rank: int) -> tuple[int, float]:
    """Runs a block on two ranks. Returns how often the second one waited for the first, and how far
    results and gradients are from those of a block that has all experts.
    """
    store = dist.distributed_c10d._get_default_store()
    awaited = ["shared experts", "their backward", "gradients of weights"] if rank else []
    first, last = (0, 2) if rank == 0 else (2, 4)
    given: Any = (dist.group.WORLD, {0: (0, 2), 1: (2, 4)})
    spread_out = block(Late(store, awaited, *given) if rank else ExpertProcessGroup(*given))
    if rank == 0:
        moe: Any = spread_out.get_submodule("layers.1.mlp")
        moe.shared_experts.register_forward_hook(lambda *_: store.set("shared experts", ""))
        moe.shared_experts.register_full_backward_hook(lambda *_: store.set("their backward", ""))
        moe.experts.gate_up_proj.register_post_accumulate_grad_hook(
            lambda _: store.set("gradients of weights", "")
        )
    generator = torch.Generator().manual_seed(1)
    size = 16, decoder(FAMILY, layers=3).hidden
    both = [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(2)]
    whole = block(None)
    got, expected = ran(spread_out, both[rank]), ran(whole, both[rank])
    expected += [gradient.clone() for gradient in gradients(whole, of_experts=False)]
    ran(whole, both[1 - rank])  # experts are given the rows of both
    expected += [gradient[first:last] for gradient in gradients(whole, of_experts=True)]
    got += [*gradients(spread_out, of_experts=False), *gradients(spread_out, of_experts=True)]
    pairs = zip(got, expected, strict=True)
    return 3 - len(awaited), max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


@pytest.mark.parametrize("backend", ["gloo", "dicomm"])
def test_a_block_computes_while_rows_are_on_their_way(backend: str) -> None:
    """One rank sends nothing until the other has computed it all, which would otherwise wait."""
    both = hspmd_ranks.Ranks(2, backend)
    try:
        (_, error), (waited, other_error) = both.run(meet)
    finally:
        both.close()
    assert waited == 3
    assert max(error, other_error) < 1e-12


# ---------------------------------------------------------------- what it costs


def balanced() -> HuggingFaceModel:
    """Every token goes to all experts, so that each of them has as many rows as is assumed."""
    sizes = dict(hidden_size=128, moe_intermediate_size=128, vocab_size=512, num_experts_per_tok=4)
    values = tiny_config(FAMILY, layers=4, first_k_dense_replace=0, **sizes).to_dict()
    return read(values, "balanced", sequence_length=128)


@pytest.mark.exhaustive
@pytest.mark.parametrize("of", [halved, lambda plan: plan])
def test_a_peak_is_within_5_percent_below_the_predicted(
    tmp_path_factory: pytest.TempPathFactory, of: Callable[[Plan], Plan]
) -> None:
    chips = Ranks(chip(tmp_path_factory.mktemp("chips"), 1 << 30))
    plan = spread(plan_of(balanced(), (2, 2), (2, 2), (1, 1)), {0: (1, 3), 1: (2, 2)})
    try:
        check_memory(chips, of(plan))
    finally:
        chips.close()


@pytest.mark.long
def test_rows_take_the_time_that_nothing_hides() -> None:
    """That is their way to the experts on fast links, and all four ways on slow ones."""
    plan = spread(plan_of(balanced(), (4,), (2,), (1,), zero_stage=0), {0: (2, 2)})
    links = 1e12, 1e11, 1e6, 1e5  # bytes a second
    fast, _, slow = (
        (on(plan, (1, 1), a) - on(plan, (1, 1), b)) / (1 / a - 1 / b) for b, a in pairwise(links)
    )
    model = plan.model
    rows = 2 * model.sequence_length * 4 / 2  # of a micro-batch, half of them to the other rank
    one_way = rows * model.hidden * 4 * model.layers * plan.pipelines[0].micro_batches
    whole = sum(math.prod(p.shape) for p in model.parameters() if not model.is_of_experts(p))
    gradients = 4 * whole  # in a ring of two, what both of them hold
    assert fast - gradients == pytest.approx(one_way, rel=0.02)
    assert slow - gradients == pytest.approx(4 * one_way, rel=0.02)
