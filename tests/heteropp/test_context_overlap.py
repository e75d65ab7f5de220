"""Attention runs on a rank's own tokens while keys and values of others are on their way."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any

import hspmd_ranks
import pytest
import torch
import torch.distributed as dist
from clusters import cluster_of, tiny_model
from layouts import plan_of
from test_context_parallel import cut
from torch import Tensor

from ditorch.chips import load_chip
from heteropp.models.llama.model import LlamaModel
from heteropp.models.parallel import context_attention
from heteropp.models.parallel.context_parallel import ContextProcessGroup
from heteropp.models.parallel.tensor_parallel import SoloGroup
from heteropp.models.stage_module import StageModule
from heteropp.simulator.simulate import simulate

PARTS = (0, 10), (10, 16)


class Late(ContextProcessGroup):
    """Sends only once the other rank has attended to what it has itself."""

    def start(
        self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]
    ) -> Callable[[], None]:
        if sent:
            store = dist.distributed_c10d._get_default_store()
            store.wait(["forward" if self.index == 0 else "backward"], timedelta(seconds=60))
        return super().start(sent, received)


def telling(attend: Callable[..., Any], what: str, causal_at: int) -> Callable[..., Any]:
    """Returns a kernel that says in the store when it is through with a rank's own tokens."""

    def told(*given: Any) -> Any:
        result = attend(*given)
        if given[causal_at]:
            dist.distributed_c10d._get_default_store().set(what, "")
        return result

    return told


def block(model: LlamaModel, group: ContextProcessGroup | None) -> StageModule:
    stage = model.build((1, 2), SoloGroup(), "cpu", torch.float64, context=group)
    stage.initialise(seed=0)
    return stage


def ran(stage: StageModule, x: Tensor) -> list[Tensor]:
    """Returns the result, the gradient of x and those of the weights."""
    x = x.clone().requires_grad_()
    result = stage(x)
    result.square().sum().backward()
    gradients = (x.grad, *(p.grad for p in stage.parameters()))
    return [result.detach(), *(each for each in gradients if each is not None)]


def meet(rank: int) -> float:
    """Runs a block on two ranks; returns how far it is from what one rank makes of all tokens."""
    if rank == 1:
        context_attention.attend_to = telling(context_attention.attend_to, "forward", 3)
    else:
        context_attention.attend_to_backward = telling(
            context_attention.attend_to_backward, "backward", 6
        )
    model = tiny_model(sequence_length=16, attention="fused")
    world = dist.group.WORLD
    assert world is not None
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, model.hidden, generator=generator, dtype=torch.float64)
    own = slice(*PARTS[rank])
    expected = ran(block(model, None), x)
    expected[:2] = [each[own] for each in expected[:2]]
    got = ran(block(model, Late(world, PARTS)), x[own])
    for gradient in got[2:]:
        dist.all_reduce(gradient)
    pairs = zip(got, expected, strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


@pytest.mark.parametrize("backend", ["gloo", "dicomm"])
def test_a_block_attends_to_its_own_tokens_meanwhile(backend: str) -> None:
    """Each rank sends nothing until the other has done what needs nothing of it."""
    both = hspmd_ranks.Ranks(2, backend)
    try:
        errors = both.run(meet)
    finally:
        both.close()
    assert max(errors) < 1e-12


def test_keys_and_values_take_the_time_that_attention_does_not_hide() -> None:
    """That is none on fast links, and their way there and back on slow ones. Between the two, the
    later rank, which has less of its own to do, is once as far behind as the first layer's take.
    """
    model = tiny_model(sequence_length=2048, hidden=64, attention="fused")
    plan = cut(plan_of(model, (4,), (1,), (2,)), {0: [(1024, 1024)]})
    chip = load_chip("a-mini")

    def step_s(bytes_per_s: float) -> float:
        links = replace(chip.links, intra_node_bytes_per_s=bytes_per_s)
        return simulate(plan, cluster_of(("x", replace(chip, links=links), 2))).step_s

    def bytes_between(links: Sequence[float]) -> list[float]:
        return [(step_s(b) - step_s(a)) / (1 / b - 1 / a) for a, b in pairwise(links)]

    fast, _, between, _, slow = bytes_between((1e12, 1e11, 2.4e7, 2e7, 1e6, 1e5))
    gradients = 4 * sum(math.prod(p.shape) for p in model.parameters())  # in a ring of two
    tokens = 1024 * plan.micro_batch * plan.pipelines[0].micro_batches
    there_and_back = 2 * tokens * model.layers * 2 * model.kv_heads * model.head_size * 4
    assert fast == pytest.approx(gradients, rel=0.02)
    assert between == pytest.approx(gradients + there_and_back / 2 / model.layers, rel=0.02)
    assert slow == pytest.approx(gradients + there_and_back, rel=0.02)
