"""Zorse's planner: cuts against brute force over nodes, and its plans."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from clusters import cluster_of, random_chip, tiny_model

from heteropp.cost.planned import check_cluster, rank_memory
from heteropp.description.chips import ChipSpec, Collectives, load_chip
from heteropp.description.cluster import Cluster, read_cluster
from heteropp.description.plan import Plan, ministage_layers, validate
from heteropp.search.node_groups import NodeGroups
from heteropp.search.planner import Request, SearchError
from heteropp.search.zorse import search


def lightest_cut(cluster: Cluster) -> float:
    """The least weight between two sides of all nodes, every 2-cut tried, chip by chip."""
    best = float("inf")
    nodes = range(len(cluster.nodes))
    for size in range(1, len(nodes)):
        for side in itertools.combinations(nodes, size):
            weight = sum(
                cluster.link(a, b).bytes_per_s
                for i in side
                for j in nodes
                if j not in side
                for a in cluster.nodes[i].ranks
                for b in cluster.nodes[j].ranks
            )
            best = min(best, weight)
    return best


def test_the_first_split_is_the_lightest_cut() -> None:
    generator = random.Random(3)
    for _ in range(12):
        nodes = []
        for index in range(generator.choice([1, 2, 3])):
            chip, size = random_chip(generator), generator.choice([1, 2])
            nodes += [(f"chip-{index}", chip, size)] * generator.choice([1, 2, 3])
        cluster = cluster_of(*nodes)
        if len(cluster.nodes) == 1:
            continue
        groups = NodeGroups(cluster)
        part, rest = groups.splits()[1]
        assert groups.cut_weight(part, rest) == pytest.approx(lightest_cut(cluster), rel=1e-12)


def test_every_division_holds_every_node_once() -> None:
    for name in ("zorse-a", "zorse-b", "zorse-c"):
        cluster = read_cluster(name)
        groups = NodeGroups(cluster)
        divisions = groups.divisions()
        assert len(set(divisions)) == len(divisions)
        for division in divisions:
            held = [node for group in groups.nodes(division) for node in group]
            assert sorted(node.ranks.start for node in held) == [
                node.ranks.start for node in cluster.nodes
            ]


def test_the_paper_s_groups_are_among_the_divisions() -> None:
    """Section 6.2: four groups of B's like machines; C's V100s and T4s in halves."""

    def found(name: str, expected: list[tuple[str, int]]) -> bool:
        cluster = read_cluster(name)
        groups = NodeGroups(cluster)
        return any(
            sorted((nodes[0].chip_name, len(nodes)) for nodes in groups.nodes(division)) == expected
            for division in groups.divisions()
        )

    assert found("zorse-a", [("a100", 1), ("a100", 1), ("h100-nvl", 1), ("h100-nvl", 1)])
    assert found("zorse-b", [("a100-40gb", 1), ("a10g", 2), ("t4", 3), ("v100", 2)])
    halves = [("a10g", 2), *[("t4", 3)] * 4, ("v100", 1), ("v100", 1)]
    assert found("zorse-c", halves)


@pytest.fixture(scope="module")
def planned() -> list[tuple[Cluster, Plan]]:
    generator, found = random.Random(11), []
    while len(found) < 12:
        nodes = [
            (f"chip-{index}", random_chip(generator), generator.choice([1, 2]))
            for index in range(generator.choice([1, 2, 3]))
        ]
        cluster, model = cluster_of(*nodes), tiny_model(generator.randint(3, 6))
        request = Request(cluster=cluster, model=model, global_batch=generator.choice([8, 12]))
        try:
            found.append((cluster, search(request).best.plan))
        except SearchError:
            continue
    return found


def test_plans_are_valid_and_fit(planned) -> None:
    assert any(plan.pipelines[0].stages[0].ministages > 1 for _, plan in planned)
    assert any(len(plan.pipelines[0].stages) > 1 for _, plan in planned)
    for cluster, plan in planned:
        validate(plan)
        check_cluster(plan, cluster)
        assert (plan.schedule, plan.zero_stage) == ("gpipe", 2)
        memory = rank_memory(plan)
        for rank in range(cluster.world_size):
            assert memory[rank].total <= cluster.chip(rank).memory.capacity_bytes
        held = ministage_layers(plan.pipelines[0], plan.schedule)
        layers = sorted(n for stage in held for first, last in stage for n in range(first, last))
        assert layers == list(range(plan.model.layers))


def test_a_faster_chip_of_a_group_takes_more_of_the_batch() -> None:
    """One layer makes one group of all chips, fast and slow."""
    fast = load_chip("a-mini")
    slow = replace(fast, compute=replace(fast.compute, efficiency=fast.compute.efficiency / 3))
    slow = replace(slow, memory=replace(slow.memory, capacity_bytes=slow.memory.capacity_bytes - 1))
    cluster = cluster_of(("fast", fast, 2), ("slow", slow, 2))
    model = tiny_model(1, hidden=256, intermediate=512)
    stage = search(Request(cluster=cluster, model=model, global_batch=24)).best.plan.pipelines[0]
    shares = {replica.chip: replica.batch_share for replica in stage.stages[0].replicas}
    assert shares["fast"] > shares["slow"]


def test_collectives_inside_a_node_take_what_was_measured_of_them() -> None:
    chip = load_chip("a-mini")
    measured = replace(chip, collectives=Collectives(1e-3, 1e7, four_bytes_per_s=2e7))
    link = replace(chip.links, intra_node_latency_s=1e-3, intra_node_bytes_per_s=2e7)

    def cost_s(chip: ChipSpec) -> float:
        cluster = cluster_of(("a-mini", chip, 4))
        return search(Request(cluster=cluster, model=tiny_model(2), global_batch=8)).best.cost_s

    assert cost_s(measured) == cost_s(replace(chip, links=link)) > cost_s(chip)


def test_what_cannot_be_is_one_sentence() -> None:
    cluster = cluster_of(("a-mini", load_chip("a-mini"), 2))
    with pytest.raises(SearchError, match="divisor") as error:
        search(Request(cluster=cluster, model=tiny_model(2), global_batch=1))
    assert "\n" not in str(error.value)
