"""The default planner lets experts lie over ranks that fit no other way, or are faster so."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from clusters import cluster_of, write_cluster
from parity import TOLERANCE, Ranks
from test_cli_search import command
from test_expert_parallel import alone
from test_parity import check
from tiny_decoders import tiny_config

import ditorch.chips
from ditorch.chips import load_chip
from heteropp.cost.capacity import fits
from heteropp.description.cluster import Cluster
from heteropp.description.used_chips import used_cluster
from heteropp.models.hugging_face.model import HuggingFaceModel
from heteropp.models.hugging_face.reading import read
from heteropp.search.judge import ask
from heteropp.search.planner import OPTIONS, Request

OPEN = frozenset(OPTIONS)


@cache
def decoder(**changes: int) -> HuggingFaceModel:
    """One layer, most of which is four experts."""
    values = tiny_config("mixtral", layers=1, **changes).to_dict()
    return read(values, "mixtral", sequence_length=16, dtype="float64")


def two_types(capacity_bytes: int) -> Cluster:
    """Two chips of each of two types, none of which joins another in tensor parallelism."""
    chips = []
    for name in ("a-mini", "b-mini"):
        chip = load_chip(name)
        memory = replace(chip.memory, capacity_bytes=capacity_bytes)
        chips.append((name, replace(chip, memory=memory, tp_limit=1), 2))
    return cluster_of(*chips)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


@pytest.mark.exhaustive
def test_a_plan_with_experts_over_ranks_is_shorter_than_the_best_without() -> None:
    request = Request(
        cluster=two_types(10**8),
        model=decoder(intermediate_size=256),
        global_batch=8,
        expert_parallel=4,
        open=OPEN,
    )
    whole = ask("auto", replace(request, expert_parallel=None), 1).best
    assert not whole.plan.has_expert_parallelism
    judged = ask("auto", request, 1).best
    assert judged.plan.has_expert_parallelism
    assert judged.simulation.step_s < 0.8 * whole.simulation.step_s
    assert judged.plan.prediction is not None
    assert 0 < judged.plan.prediction.lower_bound_s <= judged.simulation.step_s


@pytest.mark.long
def test_experts_over_ranks_fit_where_nothing_else_does_and_train_the_same(ranks: Ranks) -> None:
    request = Request(
        cluster=two_types(3_000_000),
        model=decoder(intermediate_size=256),
        global_batch=8,
        open=OPEN,
    )
    whole = ask("auto", replace(request, expert_parallel=1))
    assert "no plan fits" in str(whole.error)
    plan = ask("auto", request, 1).best.plan
    assert plan.has_expert_parallelism
    assert fits(plan, used_cluster(plan, request.cluster))
    check(ranks.train(plan), alone(ranks, plan), TOLERANCE["float64"])


@pytest.mark.exhaustive  # it traces for minutes
def test_sequences_are_cut_and_experts_spread_where_neither_is_enough(ranks: Ranks) -> None:
    """Explicit scores of long sequences, and experts, each of which alone fill a chip."""
    values = tiny_config("mixtral", layers=1, intermediate_size=512, sliding_window=None).to_dict()
    model = read(values, "mixtral", sequence_length=128, dtype="float64")
    chip = load_chip("a-mini")
    memory = replace(chip.memory, capacity_bytes=4_500_000)
    cluster = cluster_of(("a-mini", replace(chip, memory=memory, tp_limit=1), 4))
    request = Request(cluster=cluster, model=model, global_batch=4, open=OPEN)
    for without in ("expert_parallel", "context_parallel"):
        assert "no plan fits" in str(ask("auto", replace(request, **{without: 1})).error)
    plan = ask("auto", request, 1).best.plan
    assert plan.has_expert_parallelism and plan.has_context_parallelism
    assert fits(plan, used_cluster(plan, request.cluster))
    check(ranks.train(plan), alone(ranks, plan), TOLERANCE["float64"])


@pytest.mark.long
def test_the_command_shows_experts_and_says_why(tmp_path: Path) -> None:
    """All experts do not fit on either chip, and no tensor parallelism divides 15 tokens."""
    chip = (Path(ditorch.chips.__file__).parent / "a-mini.toml").read_text()
    (tmp_path / "small.toml").write_text(
        re.sub(r"capacity_bytes *= [\d_]+", "capacity_bytes = 2_000_000", chip)
    )
    cluster = write_cluster(tmp_path / "cluster.toml", ("small.toml", 2))
    folder = tmp_path / "model"
    folder.mkdir()
    config = tiny_config("mixtral", layers=1, intermediate_size=256).to_dict()
    (folder / "config.json").write_text(json.dumps(config))
    asked = ("search", "--cluster", cluster, "--model", folder, "--sequence-length", 15)
    kept = ("--global-batch", 2, "--schedule", "gpipe", "--zero-stage", 0)
    found = command(*asked, *kept, "--explain")
    assert found.exit_code == 0, found.stderr
    assert re.search(r"dp +tp +ep +R", found.stdout)
    why = r"with all experts rank 0 would need [\d.]+ MiB, and has 1\.9 MiB"
    assert re.search(rf"stage 0 has ep 2 of 2 \+ 2 experts: {why}", found.stdout), found.stdout
    whole = command(*asked, *kept, "--expert-parallel", 1)
    assert whole.exit_code == 2
    assert "let experts lie over up to 8 ranks (--expert-parallel 8)" in whole.stderr
    exact = command(*asked, *kept, "--planner", "exact")
    assert "let experts lie over up to 8 ranks (--expert-parallel 8)" in exact.stderr
    other = command(*asked, *kept, "--planner", "uniform")
    said = "let experts lie over up to 8 ranks, as planner auto does"
    assert f"{said} (--planner auto --expert-parallel 8)" in other.stderr
    uniform = command(*asked, "--global-batch", 2, "--planner", "uniform", "--expert-parallel", 2)
    assert "for planners auto and exact; uniform spreads no experts" in uniform.stderr
    dense = ("search", "--cluster", cluster, "--model", "gpt2", "--global-batch", 1)
    for option in ("--expert-parallel", "--expert-capacity"):
        refused = command(*dense, option, 2)
        assert "has no experts that could lie over ranks" in refused.stderr
    capacity = ("--global-batch", 2, "--expert-capacity", 1.5)
    uniform = command(*asked, *capacity, "--planner", "uniform")
    assert "capacity is for planners auto and exact; uniform spreads no experts" in uniform.stderr
    exact = command(*asked, *capacity, "--planner", "exact")
    assert "planner exact spreads none unless expert parallelism is given" in exact.stderr
    none = command(*asked, *capacity, "--expert-parallel", 1)
    said = "expert capacity is 1.5 and expert parallelism 1, which spreads no experts"
    assert none.exit_code == 2 and said in none.stderr
