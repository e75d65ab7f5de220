"""Metis's cost by hand, its search step by step, and its plans as ours."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from clusters import cluster_of, tiny_model
from invented import invented_traces_alone

from ditorch.chips import load_chip
from heteropp.cost.capacity import check_memory
from heteropp.cost.planned import check_cluster
from heteropp.description.plan import validate
from heteropp.search import metis, metis_oom
from heteropp.search.metis_balance import partition, relieved
from heteropp.search.metis_cost import Arrangement, Line, MetisPlan, cost
from heteropp.search.metis_files import LayerProfile, MetisNode, Profiles
from heteropp.search.metis_groups import arrangements, device_groups
from heteropp.search.metis_problem import Problem
from heteropp.search.metis_walk import Walk
from heteropp.search.planner import DoesNotFitError, Request, SearchError, planner


def layer_profile(seconds: list[float], memory: float, between_s: float = 0.0) -> LayerProfile:
    nothing = (0.0,) * len(seconds)
    return LayerProfile(tuple(seconds), between_s, (memory,) * len(seconds), nothing, nothing, 0.0)


def problem(**changes) -> Problem:
    """Two nodes of four slow chips and one of four that are twice as fast; three layers."""
    table = {
        (tp, batch): layer_profile([batch * s / tp for s in (1.0, 2.0, 3.0)], 10 / tp, 0.5 * batch)
        for tp in (1, 2, 4)
        for batch in (1, 2, 4)
    }
    fast = {
        key: layer_profile([s / 2 for s in profile.seconds], 10 / key[0], 0.25)
        for key, profile in table.items()
    }
    return Problem(
        **{
            "nodes": (
                MetisNode("slow", 4, 100.0, 50.0, 10.0),
                MetisNode("slow", 4, 100.0, 50.0, 10.0),
                MetisNode("fast", 4, 400.0, 80.0, 20.0),
            ),
            "profiles": Profiles(
                3,
                (30.0, 60.0, 90.0),
                {"slow": 6.0, "fast": 3.0},
                0.125,
                {"slow": table, "fast": fast},
            ),
            "global_batch": 16,
            "activation_bytes": 40.0,
            "memory_coefficient": 1.0,
            **changes,
        }
    )


def test_cost_term_by_term() -> None:
    """slow: two replicas of four chips, 2 sequences each; fast: four of one chip, 1 each."""
    made = problem()
    line = Line(made, ("slow", "fast"))
    plan = MetisPlan(Arrangement(("slow", "fast"), (8, 4), 4), ((2, 4), (4, 1)), (0, 1, 3))
    first_s, second_s = 2 * 1.0 / 4, (2.0 + 3.0) / 2
    found = cost(made, line, plan)
    assert found.execution_s == pytest.approx(3 * second_s + first_s + second_s)
    assert found.between_s == pytest.approx(4 * 0.25)
    assert found.update_s == pytest.approx(max(6.0 * 1 / 3 / 4, 3.0 * 2 / 3))
    # 2 (dp - 1) / (dp tp bandwidth): between slow nodes, and inside the fast one
    assert found.gradients_s == pytest.approx(
        max(2 * 1 / (2 * 4 * 10) * 30, 2 * 3 / (4 * 1 * 80) * 150)
    )
    assert found.activations_s == pytest.approx(40 * 2 / 10)
    assert found.data_s == pytest.approx(4 * 0.125)
    assert found.total_s == pytest.approx(sum(vars(found).values()))


def test_cost_of_stages_inside_one_node_uses_its_own_links() -> None:
    made = problem(nodes=(MetisNode("fast", 4, 400.0, 80.0, 20.0),), global_batch=2)
    plan = MetisPlan(Arrangement(("fast",), (2, 2), 1), ((2, 1), (2, 1)), (0, 2, 3))
    found = cost(made, Line(made, ("fast",)), plan)
    assert found.activations_s == pytest.approx(40 / 80)


def test_replicas_inside_one_node_sum_gradients_as_was_measured_of_so_many() -> None:
    groups = (80.0, 80.0, 60.0, 50.0, 40.0)
    made = problem(nodes=(MetisNode("fast", 4, 400.0, 80.0, 20.0, groups),), global_batch=4)
    plan = MetisPlan(Arrangement(("fast",), (4,), 1), ((4, 1),), (0, 3))
    found = cost(made, Line(made, ("fast",)), plan)
    assert found.gradients_s == pytest.approx(2 * 3 / (4 * 40) * 180)


def test_mixed_stage_shares_by_speed_and_takes_its_slowest_replica() -> None:
    made = problem(global_batch=10)
    line = Line(made, ("slow", "fast"))
    group = line.group(4, 8, 4, 1)  # one replica on a slow node, one on the fast
    assert group is not None
    assert group.shares == (3, 7)  # 10/3 and 20/3: the larger remainder takes the last
    seconds = [3 * 6.0 / 4, 7 * 6.0 / 2 / 4]
    assert group.seconds(0, 3) == pytest.approx(max(seconds))
    assert line.bandwidth(4, 12) == 10.0


def test_memory_by_metis_rule_or_each_chip_for_itself() -> None:
    line = Line(problem(memory_coefficient=5.0), ("slow", "fast"))
    uniform, mixed = line.group(0, 8, 2, 4), line.group(4, 8, 2, 4)
    alone = Line(problem(pooled=False), ("slow", "fast")).group(4, 8, 2, 4)
    assert uniform and mixed and alone
    assert uniform.memory(0, 2, in_flight=1) == (5 * 2 * 10 / 2, 8 * 100.0)
    assert mixed.memory(0, 2, in_flight=1) == (4 * 5 * 2 * 10 / 2, 4 * 100.0 + 4 * 400.0)
    assert alone.memory(0, 2, in_flight=1) == (2 * 10 / 2, 100.0)


def test_groups_that_cannot_be() -> None:
    line = Line(problem(), ("slow", "fast"))
    assert line.group(2, 4, 4, 4) is None  # tensor parallelism across nodes
    assert line.group(0, 2, 4, 4) is None
    assert line.group(0, 8, 1, 8) is None  # 8 replicas of 2 sequences
    assert line.group(0, 4, 4, 1) is None  # 16 sequences are not profiled


def test_device_groups_are_powers_of_two_near_the_mean() -> None:
    made = problem(nodes=tuple(MetisNode("slow", 4, 1.0, 1.0, 1.0) for _ in range(8)))
    assert list(device_groups(made, 1)) == [(32,)]
    assert list(device_groups(made, 3)) == []  # 16 each at least
    assert sorted(device_groups(made, 7)) == sorted(set(itertools.permutations([4] * 6 + [8])))
    assert len(set(device_groups(made, 5))) == 0
    loose = problem(nodes=made.nodes, variance=0.5)
    assert sorted(device_groups(loose, 3)) == [(8, 8, 16), (8, 16, 8), (16, 8, 8)]


def test_long_permutations_keep_the_smallest_groups_together() -> None:
    made = problem(nodes=(MetisNode("slow", 8, 1.0, 1.0, 1.0),), variance=0.0, permute_length=6)
    found = [groups for groups in device_groups(made, 7) if sorted(groups) == [1] * 6 + [2]]
    assert sorted(found) == [
        (1, 1, 1, 1, 1, 1, 2),
        (1, 1, 1, 1, 2, 1, 1),
        (1, 1, 2, 1, 1, 1, 1),
        (2, 1, 1, 1, 1, 1, 1),
    ]


def test_every_order_has_every_number_of_stages_and_micro_batches() -> None:
    """The public tool leaves the one-stage plan out from the second order on."""
    made = problem(nodes=(*problem().nodes, MetisNode("fast", 4, 400.0, 80.0, 20.0)))
    found = list(arrangements(made))
    for order in (("fast", "slow"), ("slow", "fast")):
        own = [a for a in found if a.order == order]
        assert {len(a.groups) for a in own} == {1, 2}
        assert {a.micro_batches for a in own} == {1, 2, 4, 8, 16}
    assert all(sum(a.groups) == 16 for a in found)


def test_partition_holds_every_layer_for_any_speeds() -> None:
    """The public tool's balancer leaves layers out of about half of its plans."""
    for layers, stages in itertools.product(range(1, 9), range(1, 5)):
        if stages > layers:
            continue
        shares = tuple(layer / layers for layer in range(layers + 1))
        for weights in itertools.product((1.0, 3.0, 50.0), repeat=stages):
            speeds = [weight / sum(weights) for weight in weights]
            boundaries = partition(speeds, shares)
            assert boundaries[0] == 0 and boundaries[-1] == layers
            assert all(a < b for a, b in itertools.pairwise(boundaries))


def test_partition_follows_the_speeds() -> None:
    shares = tuple(layer / 10 for layer in range(11))
    assert partition([0.5, 0.3, 0.2], shares) == (0, 5, 8, 10)
    assert partition([0.24, 0.76], shares) == (0, 2, 10)
    assert partition([0.26, 0.74], shares) == (0, 3, 10)


def test_relief_moves_work_to_where_memory_is() -> None:
    moved = relieved([0.5, 0.5], [20.0, 10.0], [10.0, 30.0])
    assert moved is not None
    assert moved[0] == pytest.approx(0.5 * 0.5 * 0.9)
    assert sum(moved) == pytest.approx(1.0, abs=0.01)
    assert relieved([0.5, 0.5], [20.0, 10.0], [10.0, 11.0]) is None


def test_degrees_change_until_memory_suffices() -> None:
    """One stage whose layers fit at tp 4 only: two changes, and two layers that cannot move."""
    made = problem(
        nodes=(MetisNode("slow", 4, 8.0, 50.0, 10.0),),
        pooled=False,
        global_batch=4,
        profiles=Profiles(
            1,
            (30.0,),
            {"slow": 6.0},
            0.0,
            {
                "slow": {
                    (tp, b): layer_profile([1.0], 32 / tp) for tp in (1, 2, 4) for b in (1, 2, 4)
                }
            },
        ),
    )
    for planner_ in (metis, metis_oom):
        walk = Walk(made, planner_.priority)
        walk.run(keep=3)
        assert {plan.degrees for _, plan in walk.best} == {((1, 4),)}
        # 4 micro-batches of 1: dp 4 and 2 have no sequences for all; 2 of 2: dp 4 has none
        # 1 of 4: dp 4 and 2 do not fit
        assert walk.plans == 3
        assert walk.steps == 2 + (1 + 2) + 4


def test_limits_end_a_search() -> None:
    whole, part = Walk(problem(), metis.priority), Walk(problem(), metis.priority)
    whole.run(keep=1)
    part.run(keep=1, most_looks=whole.looks // 2)
    assert whole.complete and not part.complete
    assert whole.looks // 2 <= part.looks < whole.looks


@pytest.fixture
def invented_traces() -> Iterator[None]:
    with invented_traces_alone():
        yield


def request(capacity_bytes: int = 10_000_000, **changes) -> Request:
    a, b = (
        replace(chip, memory=replace(chip.memory, capacity_bytes=capacity_bytes))
        for chip in (load_chip("a-mini"), load_chip("b-mini"))
    )
    cluster = cluster_of(("a", a, 2), ("a", a, 2), ("b", b, 2), ("b", b, 2))
    return Request(**{"cluster": cluster, "model": tiny_model(6), "global_batch": 16, **changes})


@pytest.mark.parametrize("name", ["metis", "metis-oom"])
def test_plans_are_valid_fit_and_are_bounded(invented_traces: None, name: str) -> None:
    for zero_stage in (0, 1):
        made = request(zero_stage=zero_stage)
        result = planner(name)(made)
        assert result.planner == name and result.steps > 0
        costs = [candidate.cost_s for candidate in (result.best, *result.runners_up)]
        assert costs == sorted(costs)
        assert 0 < result.lower_bound_s <= costs[0] * (1 + 1e-9)
        for candidate in (result.best, *result.runners_up):
            validate(candidate.plan)
            check_cluster(candidate.plan, made.cluster)
            check_memory(candidate.plan, made.cluster)
            assert candidate.plan.zero_stage == zero_stage


def test_refusals_are_sentences(invented_traces: None) -> None:
    with pytest.raises(SearchError, match="metis plans schedule 1f1b; the schedule is gpipe"):
        metis.search(request(schedule="gpipe"))
    with pytest.raises(DoesNotFitError, match=r"metis-oom found no plan that fits: stage \d needs"):
        metis_oom.search(request(capacity_bytes=50_000))
