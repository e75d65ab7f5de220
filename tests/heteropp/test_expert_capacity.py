"""A plan may say how many rows the experts of a rank take at most: memory has room for them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from layouts import plan_of
from parity import RankError, Ranks
from test_expert_parallel import balanced, refused, spread, with_idle_routers
from test_memory import chip
from training_run import Training

from heteropp.cost.planned import rank_memory
from heteropp.cost.tracing.kind import Spread
from heteropp.cost.tracing.operators import CountingExperts, CountingGroup
from heteropp.description.plan import Plan, read_plan, write_plan
from heteropp.models.hugging_face.reading import read
from heteropp.models.parallel.expert_parallel import Routes

STEPS = 2


def with_capacity(plan: Plan, capacity: float | None) -> Plan:
    """Every stage whose experts lie over ranks states it."""
    pipelines = tuple(
        replace(
            pipeline,
            stages=tuple(
                replace(stage, expert_capacity=capacity) if stage.ep > 1 else stage
                for stage in pipeline.stages
            ),
        )
        for pipeline in plan.pipelines
    )
    return replace(plan, pipelines=pipelines)


@pytest.fixture(scope="module")
def chips(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks(chip(tmp_path_factory.mktemp("chips"), 1 << 30))
    yield found
    found.close()


def skewed(folder: Path) -> Plan:
    """Two ranks with half of the experts each, where the routers choose those of the first."""
    values = json.loads((with_idle_routers(folder) / "config.json").read_text())
    model = read(values, "skewed", sequence_length=32)
    return spread(plan_of(model, (4,), (2,), (1,), zero_stage=0), {0: (2, 2)})


def test_all_ranks_say_which_experts_are_given_more_than_they_have_room_for(
    chips: Ranks, tmp_path: Path
) -> None:
    plan = skewed(tmp_path / "model")
    dropless = chips.train(plan, STEPS, weights=tmp_path / "model")
    enough = with_capacity(plan, 2)  # all rows go to one of two
    assert chips.train(enough, STEPS, weights=tmp_path / "model").losses == dropless.losses
    own = Ranks(chips.chip)
    with pytest.raises(RankError) as raised:
        own.train(with_capacity(plan, 1.5), STEPS, weights=tmp_path / "model")
    rows = 4 * 32 * 2  # of a micro-batch: each token goes to two experts
    said = (
        rf"the routers of layer \d send {rows} rows of a micro-batch to the experts of rank 0, "
        rf"which have room for {rows * 3 // 4}: 1\.5 times their part of {rows}, as "
        "expert_capacity of the plan's stage says"
    )
    assert len(re.findall(said, str(raised.value))) == 2  # of both ranks


@pytest.mark.long
def test_the_command_ends_with_that_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    plan = with_capacity(skewed(folder), 1.25)
    training = Training(tmp_path, plan, "--from", str(folder), "--steps", "2", device="cpu")
    code, _, stderr = training.wait()
    assert code == 1
    assert re.search(r"rank \d.* stopped: the routers of layer 1 send 256 rows", stderr), stderr
    assert "Traceback" not in stderr


def test_memory_has_room_for_the_rows_that_are_stated(chips: Ranks, tmp_path: Path) -> None:
    """The first rank has one of four experts, and that is given half of all rows."""
    sizes = dict(hidden_size=128, moe_intermediate_size=128, vocab_size=512, head_dim=32)
    folder = with_idle_routers(tmp_path / "model", **sizes, decoder_sparse_step=1)
    values = json.loads((folder / "config.json").read_text())
    model = read(values, "skewed", sequence_length=32)
    plan = with_capacity(spread(plan_of(model, (4,), (2,), (1,)), {0: (1, 3)}), 2)
    peaks = chips.train(plan, STEPS, weights=folder).peak_memory_bytes
    full, other = rank_memory(plan)
    assert 0.95 * full.total <= peaks[0] <= full.total
    assert peaks[1] <= other.total
    assert peaks[0] > rank_memory(with_capacity(plan, None))[0].total


def test_more_capacity_takes_more_memory_up_to_all_rows() -> None:
    plan = spread(plan_of(balanced(), (4,), (2,), (1,)), {0: (3, 1)})
    even, *others = (
        rank_memory(with_capacity(plan, capacity)) for capacity in (None, 1.0, 1.5, 4.0, 9.0)
    )
    assert others[0] == even
    assert even[0].working < others[1][0].working == others[2][0].working  # it has 3 of 4 experts
    assert even[1].working < others[1][1].working < others[2][1].working == others[3][1].working
    assert all(
        one.parameters == other.parameters for one, other in zip(even, others[3], strict=True)
    )


@pytest.mark.parametrize(
    ("ranks", "tokens", "capacity"), [(64, 512, "1.1"), (32, 8192, "1.25"), (8, 64, "1.5")]
)
def test_there_is_room_for_every_row_that_may_come(ranks: int, tokens: int, capacity: str) -> None:
    """Also where many ranks each have a few, whose parts of rows are more than nothing."""
    even = Spread((2,) * ranks, (1,) * ranks)
    group = CountingExperts(CountingGroup(1), even.with_more_rows(Fraction(capacity)))
    chosen = torch.empty(tokens, dtype=torch.int64, device="meta")
    routes = Routes(group, group.counts(chosen, 2 * ranks, 0))
    allowed = int(Fraction(capacity) * tokens)
    assert sum(routes.sent) == tokens
    assert allowed <= sum(routes.received) <= allowed + 2 * ranks


def test_a_plan_says_it_and_what_it_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    plan = with_capacity(spread(plan_of(balanced(), (4,), (2,), (1,)), {0: (3, 1)}), 1.5)
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan
    write_plan(with_capacity(plan, None), tmp_path / "without.json")
    assert "expert_capacity" not in (tmp_path / "without.json").read_text()
    where = "pipelines[0].stages[0].expert_capacity"
    for capacity in (0.5, -1.0, float("inf"), float("nan")):
        said = f"{where} is {capacity}; expected a number from 1 on, in a stage with expert_shares"
        assert refused(with_capacity(plan, capacity)) == said
    (pipeline,) = plan.pipelines
    whole = replace(pipeline.stages[0], expert_shares=None)
    assert "in a stage with expert_shares" in refused(
        replace(plan, pipelines=(replace(pipeline, stages=(whole,)),))
    )
