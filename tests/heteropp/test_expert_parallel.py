"""Experts that lie over ranks, in equal and unequal numbers, train what one process trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from layouts import MINISTAGES, SCHEDULES, plan_of, scheduled
from parity import STEPS, TOLERANCE, Ranks, Trained
from test_context_parallel import cut
from test_memory import check as check_memory
from test_memory import chip
from test_parity import check
from tiny_decoders import tiny_config

from heteropp.description.plan import Plan, PlanError, Schedule, read_plan, validate, write_plan
from heteropp.models.hugging_face.model import SPREADABLE, HuggingFaceModel
from heteropp.models.hugging_face.reading import read

Shares = Sequence[int]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


@cache
def decoder(family: str = "qwen3_moe", dtype: str = "float64", layers: int = 4) -> HuggingFaceModel:
    """A family's tiny model, some layers of which have four experts."""
    values = tiny_config(family, layers=layers).to_dict()
    return read(values, family, sequence_length=16, dtype=dtype)


def spread(plan: Plan, shares: dict[int, Shares]) -> Plan:
    """Some stages of the first pipeline with expert parallelism."""
    first, *others = plan.pipelines
    stages = tuple(
        replace(stage, expert_shares=tuple(shares[s])) if s in shares else stage
        for s, stage in enumerate(first.stages)
    )
    return replace(plan, pipelines=(replace(first, stages=stages), *others))


LAYOUTS: dict[str, Callable[[HuggingFaceModel], Plan]] = {
    "equal": lambda m: spread(plan_of(m, (4,), (2,), (1,)), {0: (2, 2)}),
    "unequal, then another": lambda m: spread(
        plan_of(m, (2, 2), (2, 3), (1, 1), shares={0: (1, 3), 1: (1, 1, 2)}),
        {0: (3, 1), 1: (1, 2, 1)},
    ),
    "two turns, ZeRO-2": lambda m: spread(
        plan_of(m, (2, 2), (4, 1), (1, 1), zero_stage=2), {0: (3, 1)}
    ),
    "with tp": lambda m: spread(plan_of(m, (2, 2), (1, 2), (2, 2)), {1: (1, 3)}),
    "sequence parallel": lambda m: spread(
        plan_of(m, (2, 2), (2, 1), (2, 1), sequence_parallel=True), {0: (1, 3)}
    ),
    "with cp": lambda m: spread(cut(plan_of(m, (2, 2), (1, 1), (2, 1)), {0: [(10, 6)]}), {0: (1, 3)}),
    "with cp in replicas, 4 ways": lambda m: spread(
        cut(plan_of(m, (2, 2), (2, 1), (2, 1), zero_stage=0), {0: [(10, 6), (7, 9)]}), {0: (1,) * 4}
    ),
    "two turns of cp": lambda m: spread(
        cut(plan_of(m, (2, 2), (2, 1), (2, 1)), {0: [(10, 6)]}), {0: (3, 1)}
    ),
}


def alone(ranks: Ranks, plan: Plan) -> Trained:
    """What one device trains, and not transformers' own loop: norms and routers are in float32
    there, so that other sums of float64 may come out as another float32.

    For that reason sequence parallelism is held against itself, with all experts on each rank.
    """
    (pipeline,) = plan.pipelines
    if any(stage.sequence_parallel for stage in pipeline.stages):
        stages = tuple(replace(stage, expert_shares=None) for stage in pipeline.stages)
        return ranks.train(replace(plan, pipelines=(replace(pipeline, stages=stages),)))
    whole = plan_of(plan.model, (plan.model.layers,), (1,), (1,))
    return ranks.train(replace(whole, optimizer=plan.optimizer))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_trains_what_one_device_does(ranks: Ranks, layout: str) -> None:
    plan = LAYOUTS[layout](decoder())
    check(ranks.train(plan), alone(ranks, plan), TOLERANCE["float64"])


# ---------------------------------------------------------------- what it costs


@pytest.fixture(scope="module")
def chips(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Chips compute with kernels of their own, exactly enough."""
    found = Ranks(chip(tmp_path_factory.mktemp("chips"), 1 << 30))
    yield found
    found.close()


def balanced(**changes: Any) -> HuggingFaceModel:
    """Every token goes to all experts, so that each of them has as many rows as is assumed."""
    sizes = dict(hidden_size=128, moe_intermediate_size=128, vocab_size=512, head_dim=32)
    sizes |= dict(num_experts_per_tok=4, decoder_sparse_step=1) | changes
    values = tiny_config("qwen3_moe", layers=4, **sizes).to_dict()
    return read(values, "balanced", sequence_length=128)


MEASURED: dict[str, Callable[[HuggingFaceModel], Plan]] = {
    "unequal": lambda m: spread(
        plan_of(m, (2, 2), (2, 1), (1, 1), shares={0: (1, 3)}), {0: (1, 3)}
    ),
    "two turns, zb-h1": lambda m: scheduled(
        spread(plan_of(m, (2, 2), (4, 1), (1, 1)), {0: (3, 1)}), "zb-h1", 1
    ),
    "ZeRO-2, with tp, zb-v": lambda m: scheduled(
        spread(plan_of(m, (2, 2), (2, 1), (2, 1), zero_stage=2), {0: (1, 3)}), "zb-v", 2
    ),
    "with cp, ZeRO-0": lambda m: spread(
        cut(plan_of(m, (2, 2), (2, 1), (2, 1), zero_stage=0), {0: [(72, 56)]}), {0: (1, 1, 1, 1)}
    ),
}


@pytest.mark.parametrize("name", MEASURED)
def test_a_peak_is_within_5_percent_below_the_predicted(chips: Ranks, name: str) -> None:
    check_memory(chips, MEASURED[name](balanced()))
