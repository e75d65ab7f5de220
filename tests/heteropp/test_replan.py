"""The next plan: on any chips that are left, of any type, it is valid, fits, and is good."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from clusters import cluster_of, random_chip, tiny_model, write_cluster
from sampled import sampled
from test_context_parallel import cut
from test_expert_capacity import with_capacity
from test_expert_parallel import spread
from tiny_decoders import tiny_config
from training_run import Training, make_plan

from ditorch.chips import ChipSpec, load_chip
from heteropp.cost.capacity import check_memory, most_lacking
from heteropp.cost.planned import check_cluster, rank_memory
from heteropp.description.cluster import Cluster, read_cluster
from heteropp.description.plan import Plan, validate
from heteropp.elastic.replanning.moved import moved_bytes
from heteropp.elastic.replanning.replan import Replanned, replan
from heteropp.elastic.replanning.spread import stated_capacity
from heteropp.models.hugging_face.reading import read
from heteropp.models.llama.model import LlamaModel
from heteropp.search.judge import ask, ask_all
from heteropp.search.planner import DoesNotFitError, Request, SearchError
from heteropp.simulator.simulate import simulate
from heteropp.state.switching.table import table

PLANNERS = ("exact", "autohet", "uniform", "zorse")
MODEL = tiny_model(6, hidden=32, intermediate=64, vocab=64)


def first_plan(cluster: Cluster, model: LlamaModel = MODEL, global_batch: int = 16) -> Plan:
    for verdict in ask_all(
        PLANNERS, Request(cluster=cluster, model=model, global_batch=global_batch)
    ):
        assert verdict.judged, verdict.error
        return verdict.best.plan
    raise AssertionError


def check(found: Replanned, cluster: Cluster, old: Plan) -> None:
    validate(found.plan)
    check_cluster(found.plan, found.cluster)
    check_memory(found.plan, found.cluster)
    assert set(found.cluster.members) <= set(cluster.members)
    assert (found.plan.model, found.plan.global_batch) == (old.model, old.global_batch)
    assert found.step_s == pytest.approx(simulate(found.plan, found.cluster).step_s, rel=1e-12)


@pytest.fixture(
    scope="module", params=[(3, 2, 1), pytest.param((4, 3, 2), marks=pytest.mark.exhaustive)]
)
def shrunk(request: pytest.FixtureRequest) -> list[tuple[Cluster, Plan, Replanned]]:
    """Chips of three types, of which one after the other goes: the chips left, and plans."""
    chips = dict(zip(("a-mini", "b-mini", "c-mini"), request.param, strict=True))
    cluster = cluster_of(*((name, load_chip(name), count) for name, count in chips.items()))
    plan, generator, found = first_plan(cluster), random.Random(3), []
    while cluster.world_size > 1:
        gone = generator.randrange(cluster.world_size)
        left = cluster.kept(rank for rank in range(cluster.world_size) if rank != gone)
        next_ = replan(left, plan, cluster.members)
        found.append((left, plan, next_))
        cluster, plan = next_.cluster, next_.plan
    return found


def test_chips_go_until_one_is_left(shrunk) -> None:
    for cluster, old, found in shrunk:
        check(found, cluster, old)
    assert shrunk[-1][0].world_size == 1


def test_odd_numbers_of_chips_are_used(shrunk) -> None:
    used = [found.cluster.world_size for cluster, _, found in shrunk]
    assert any(count % 2 and count > 3 for count in used)


@pytest.mark.exhaustive
def test_seven_of_eight_chips_go_on() -> None:
    """When one of 8 equal chips is lost, all 7 others train: the step is faster than on 4 chips."""
    chip = load_chip("a-mini")
    full = cluster_of(("a-mini", chip, 4), ("a-mini", chip, 4))
    model = tiny_model(8, hidden=128, intermediate=256, sequence_length=128)
    old = ask("exact", Request(cluster=full, model=model, global_batch=32)).best
    found = replan(full.kept(set(range(8)) - {5}), old.plan, full.members)
    assert found.cluster.world_size == 7
    four = ask("exact", Request(cluster=full.kept(range(4)), model=model, global_batch=32)).best
    assert found.step_s < 0.75 * four.simulation.step_s
    assert found.step_s < 8 / 7 * 1.2 * old.simulation.step_s


def test_no_planner_knows_a_better_plan(shrunk) -> None:
    for cluster, old, found in shrunk[::4]:
        request = Request(cluster=cluster, model=old.model, global_batch=old.global_batch)
        for verdict in ask_all(PLANNERS[:3], request):
            if verdict.judged:
                assert found.step_s <= 1.02 * verdict.best.simulation.step_s + 1e-12


def test_nothing_moves_where_nothing_changes() -> None:
    chip = load_chip("a-mini")
    cluster = cluster_of(("a-mini", chip, 4), ("a-mini", chip, 4))
    first = replan(cluster, first_plan(cluster), cluster.members)
    again = replan(cluster, first.plan, cluster.members)
    ranks = list(range(cluster.world_size))
    assert moved_bytes(first.plan, again.plan, ranks) == 0


def test_what_moves_is_what_a_switch_sends(shrunk) -> None:
    before = shrunk[0][2].cluster
    for cluster, old, found in shrunk[1:6]:
        names = list(before.members)  # of the plan before, a chip of which has gone
        ranks = [names.index(member) for member in found.cluster.members]
        sent = table(old, found.plan, range(len(names)), ranks).volume_bytes
        assert moved_bytes(old, found.plan, ranks) == sum(sent.values())
        assert cluster.world_size < len(names)
        before = found.cluster


def test_chips_that_join_are_used() -> None:
    chip = load_chip("a-mini")
    full = cluster_of(("a-mini", chip, 4), ("a-mini", chip, 3))
    few = full.kept(range(3))
    found = replan(full, first_plan(few), few.members)
    check(found, full, found.plan)
    assert found.cluster.world_size > 3


def test_more_chips_than_work_are_left_out() -> None:
    """2 sequences, 2 layers and 4 heads do not keep 12 chips busy, nor 11."""
    chip = load_chip("a-mini")
    full = cluster_of(("a-mini", chip, 4), ("a-mini", chip, 4), ("a-mini", chip, 4))
    model = tiny_model(2, kv_heads=1)
    old = first_plan(full.kept(range(2)), model, global_batch=2)
    found = replan(full.kept(range(11)), old, full.kept(range(2)).members)
    check(found, full, old)
    assert 1 <= found.cluster.world_size <= 4


def test_a_schedule_is_kept_where_it_can_be() -> None:
    chip = load_chip("a-mini")
    full = cluster_of(("a-mini", chip, 4))
    request = Request(cluster=full, model=MODEL, global_batch=16, schedule="zb-h1", zero_stage=2)
    old = ask("exact", request).best.plan
    found = replan(full.kept([0, 1, 3]), old, full.members)
    assert (found.plan.schedule, found.plan.zero_stage) == ("zb-h1", 2)


def random_start(generator: random.Random) -> tuple[Cluster, Plan]:
    """A plan that fits on unlike chips, memory and links."""
    while True:
        nodes = [
            (f"chip-{index}", random_chip(generator), generator.choice([1, 2, 3, 4]))
            for index in range(generator.choice([1, 2, 3]))
        ]
        full, model = cluster_of(*nodes), tiny_model(generator.randint(2, 6))
        verdict = ask_all(PLANNERS, Request(cluster=full, model=model, global_batch=8))[0]
        if verdict.judged and full.world_size > 1:
            return full, verdict.best.plan


@pytest.mark.parametrize("seed", sampled(range(6), 3, everyday=1))
def test_random_clusters_lose_random_chips(seed: int) -> None:
    """Where it finds no plan, no planner does."""
    generator = random.Random(seed)
    full, old = random_start(generator)
    ranks = generator.sample(range(full.world_size), generator.randint(1, full.world_size - 1))
    left = full.kept(ranks)
    try:
        found = replan(left, old, full.members)
    except SearchError as error:
        assert "no plan for the chips that are left" in str(error) and "\n" not in str(error)
        request = Request(cluster=left, model=old.model, global_batch=8, zero_stage=old.zero_stage)
        assert not ask_all(PLANNERS, request)[0].judged
        return
    check(found, left, old)
    assert found.plan == replan(left, old, full.members).plan


def test_no_room_is_one_sentence() -> None:
    full = cluster_of(("a-mini", load_chip("a-mini"), 4))
    old = first_plan(full)
    chip = load_chip("a-mini")
    small = replace(chip, memory=replace(chip.memory, capacity_bytes=100_000))
    left = cluster_of(("a-mini", small, 2))
    with pytest.raises(SearchError) as error:
        replan(left, old, full.members)
    assert "2 of a-mini" in str(error.value) and "KiB" in str(error.value)
    assert "\n" not in str(error.value) and not isinstance(error.value, DoesNotFitError)


def test_room_is_left_for_attention_within_documents() -> None:
    chip = load_chip("a-mini")
    full = cluster_of(("a-mini", chip, 2))
    model = tiny_model(2, hidden=16, intermediate=32, vocab=64, sequence_length=128)
    old = first_plan(full, model, global_batch=4)
    left, lacking = full.kept([0]), 0
    while lacking <= 0:  # each time on a chip that just holds the plan before
        across = replan(left, old, full.members)
        (memory,) = rank_memory(across.plan, left)
        lacking, _ = most_lacking(across.plan, left, documents_apart=True)
        tight = replace(chip, memory=replace(chip.memory, capacity_bytes=memory.total))
        left = cluster_of(("a-mini", tight, 2)).kept([0])
    apart = replan(left, old, full.members, documents_apart=True)
    assert most_lacking(across.plan, left)[0] <= 0
    assert most_lacking(apart.plan, left, documents_apart=True)[0] <= 0


@pytest.mark.parametrize("lost", sampled([[1, 4], [0], [2, 3]], 3))
def test_what_is_found_trains(tmp_path: Path, lost: tuple[int, ...]) -> None:
    """The plan that is found trains with the losses of the plan before."""
    full = read_cluster(write_cluster(tmp_path / "c.toml", ("a-mini", 4), ("b-mini", 2)))
    model = tiny_model(4, hidden=32, intermediate=64, vocab=256)
    old = first_plan(full, model, global_batch=8)
    found = replan(full.kept(set(range(6)) - set(lost)), old, full.members)
    losses = []
    for plan in (old, found.plan):
        folder = tmp_path / str(plan.world_size)
        folder.mkdir()
        losses.append(Training(folder, plan, "--steps", "2", device="cpu").finish().losses)
    assert losses[0] == pytest.approx(losses[1], rel=2e-6)


# ---------------------------------------------------------------- sequences in parts


def long_model() -> LlamaModel:
    """Its attention scores are most of what it needs memory for."""
    return tiny_model(2, kv_heads=1, sequence_length=128, vocab=256)


def small(name: str, capacity_bytes: int) -> ChipSpec:
    chip = load_chip(name)
    return replace(chip, memory=replace(chip.memory, capacity_bytes=capacity_bytes))


def fits_whole(cluster: Cluster, old: Plan) -> bool:
    request = Request(cluster=cluster, model=old.model, global_batch=old.global_batch)
    return any(verdict.judged for verdict in ask_all(PLANNERS, request))


def has_parts_by_speed(plan: Plan) -> bool:
    """Whether some replica is of both types, and a group of the faster one has most tokens."""
    replicas = [r for p in plan.pipelines for s in p.stages for r in s.replicas]
    return any(
        len(set(r.chips)) == 2 and r.chips[r.token_shares.index(max(r.token_shares))] == "a-mini"
        for r in replicas
        if r.token_shares
    )


@pytest.mark.long
def test_sequences_are_cut_on_chips_that_are_left_by_their_speed() -> None:
    """Two types in a replica, of which a chip of either goes."""
    chips = ("a-mini", "a-mini", "b-mini", "b-mini")
    full = cluster_of(*((name, small(name, 850_000), 2) for name in ("a-mini", "b-mini")))
    plan = make_plan(long_model(), (2,), (1,), (4,), (False,), micro_batch=1, micro_batches=8)
    plan = cut(plan, {0: [(40, 40, 24, 24)]})
    (pipeline,) = plan.pipelines
    (replica,) = pipeline.stages[0].replicas
    replica = replace(replica, chip=chips[0], group_chips=chips)
    stage = replace(pipeline.stages[0], replicas=(replica,))
    old = replace(plan, pipelines=(replace(pipeline, stages=(stage,)),))
    validate(old)
    check_memory(old, full)
    for lost in (0, 3):
        left = full.kept(set(range(4)) - {lost})
        assert not fits_whole(left, old)
        found = replan(left, old, full.members)
        check(found, left, old)
        assert found.plan.has_context_parallelism
        assert found.cluster.world_size == 3 and has_parts_by_speed(found.plan)
        assert 0 < found.plan.prediction.lower_bound_s <= found.step_s
    with pytest.raises(SearchError, match="no plan for the chips that are left"):
        replan(full.kept([0]), old, full.members)


@pytest.mark.long
def test_sequences_are_cut_where_nothing_fits_otherwise() -> None:
    """The old plan has whole ones, on chips of more memory than those that come."""
    full = cluster_of(("a-mini", load_chip("a-mini"), 2))
    old = first_plan(full, long_model(), global_batch=8)
    left = cluster_of(("a-mini", small("a-mini", 850_000), 2))
    assert not old.has_context_parallelism and not fits_whole(left, old)
    found = replan(left, old, full.members)
    check(found, left, old)
    assert found.plan.has_context_parallelism and found.cluster.world_size == 2


# ---------------------------------------------------------------- experts over chips


@pytest.mark.long
def test_experts_lie_over_the_chips_that_are_left() -> None:
    """Experts are most of what the model needs memory for, and fit in no other way."""
    sizes = {"num_local_experts": 8, "intermediate_size": 256}
    model = read(tiny_config("mixtral", layers=2).to_dict() | sizes, "mixtral", sequence_length=16)
    full = cluster_of(("a-mini", small("a-mini", 4_000_000), 4))
    whole = make_plan(model, (2,), (4,), (1,), (False,))
    old = spread(whole, {0: (2, 2, 2, 2)})
    check_memory(old, full)
    left = full.kept([0, 1, 3])
    assert not fits_whole(left, old)
    found = replan(left, old, full.members)
    check(found, left, old)
    ((stage,),) = (pipeline.stages for pipeline in found.plan.pipelines)
    assert (stage.ep, sum(stage.expert_shares)) == (3, 8)
    with pytest.raises(SearchError, match="no plan for the chips that are left"):
        replan(full.kept([0]), old, full.members)


@pytest.mark.exhaustive
def test_experts_have_the_first_plan_s_capacity_after_one_that_spreads_none() -> None:
    sizes = {"num_local_experts": 8, "intermediate_size": 256}
    model = read(tiny_config("mixtral", layers=2).to_dict() | sizes, "mixtral", sequence_length=16)
    whole = make_plan(model, (2,), (4,), (1,), (False,))
    first = with_capacity(spread(whole, {0: (2, 2, 2, 2)}), 1.5)
    full = cluster_of(("a-mini", small("a-mini", 1 << 30), 4))
    left = cluster_of(("a-mini", small("a-mini", 4_000_000), 3))
    found = replan(left, whole, full.members, expert_capacity=stated_capacity(first))
    check(found, left, whole)
    stages = [stage for pipeline in found.plan.pipelines for stage in pipeline.stages]
    assert {stage.expert_capacity for stage in stages if stage.ep > 1} == {1.5}


@pytest.mark.exhaustive
def test_sequences_are_cut_and_experts_spread_where_neither_is_enough() -> None:
    """The old plan has all of both on each chip, and those that come have little memory."""
    sizes = {"num_local_experts": 4, "intermediate_size": 512, "sliding_window": None}
    model = read(tiny_config("mixtral", layers=1).to_dict() | sizes, "mixtral", sequence_length=128)
    full = cluster_of(("a-mini", load_chip("a-mini"), 4))
    old = make_plan(model, (1,), (4,), (1,), (False,), micro_batch=4, micro_batches=1)
    chip = replace(small("a-mini", 2_400_000), tp_limit=1)
    left = cluster_of(("a-mini", chip, 4))
    assert not fits_whole(left, old)
    found = replan(left, old, full.members)
    check(found, left, old)
    assert found.plan.has_expert_parallelism and found.plan.has_context_parallelism
