"""The default planner: as fast as any other, keeps to the request, uses the chips that help."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from clusters import cluster_of, random_chip, tiny_model
from sampled import sampled

from ditorch.chips import ChipSpec, load_chip
from heteropp.cost.capacity import fits
from heteropp.description.cluster import Cluster, Node, in_order
from heteropp.description.model import read_model
from heteropp.description.plan import Pipeline, Plan, Replica, Stage, validate
from heteropp.description.used_chips import idle_members, used_cluster
from heteropp.search.judge import ask, ask_all
from heteropp.search.planner import OPTIONS, PLANNERS, Request
from heteropp.simulator.simulate import simulate

OPEN = frozenset(OPTIONS)
ALLOWED = 1.005  # of a step that should not be longer


def random_request(seed: int) -> Request:
    """A small model on up to three chip types, of which each has a few nodes."""
    generator = random.Random(f"auto {seed}")
    nodes = []
    for name in "abc"[: generator.choice([1, 2, 2, 3])]:
        chip = random_chip(generator)
        memory = replace(chip.memory, capacity_bytes=generator.choice([120_000, 300_000, 10**7]))
        links = replace(chip.links, nic_bytes_per_s=10 ** generator.uniform(5, 8))
        size = generator.choice([1, 2, 4])
        chip = replace(chip, memory=memory, links=links)
        nodes += [Node(name, chip, range(size))] * generator.choice([1, 1, 2])
    return Request(
        cluster=Cluster("made up", in_order(nodes)),
        model=tiny_model(generator.randint(2, 6)),
        global_batch=generator.choice([4, 8, 16]),
        open=OPEN,
    )


def step_s(request: Request) -> float:
    """The step of the default planner's plan; infinite where it finds none."""
    verdict = ask("auto", request, 1)
    return verdict.best.simulation.step_s if verdict.judged else float("inf")


@pytest.mark.parametrize("seed", sampled([1, 0, 2], 2, everyday=1))
def test_no_other_planner_and_no_runner_up_is_faster(seed: int) -> None:
    request = random_request(seed)
    verdicts = ask_all(PLANNERS, request)
    free = replace(request, uneven_layers=True, stage_degrees=True)
    verdicts += [ask("exact", free), ask("auto", request)]
    own = next((v for v in verdicts if v.planner == "auto" and v.judged), None)
    for verdict in verdicts:
        for judged in verdict.judged:
            assert own is not None
            assert own.best.simulation.step_s <= judged.simulation.step_s * (1 + 1e-9)
    if own is None:
        return
    plan = own.best.plan
    validate(plan)
    cluster = used_cluster(plan, request.cluster)
    assert fits(plan, cluster)
    assert plan.prediction is not None
    assert plan.prediction.step_s == simulate(plan, cluster).step_s
    assert plan.prediction.lower_bound_s <= plan.prediction.step_s


def test_what_the_request_names_is_kept() -> None:
    request = random_request(1)
    for schedule in ("gpipe", "interleaved-1f1b", "zb-v"):
        named = replace(request, schedule=schedule, open=OPEN - {"schedule"})
        verdict = ask("auto", named)
        assert verdict.judged
        assert all(judged.plan.schedule == schedule for judged in verdict.judged)
    named = replace(request, zero_stage=2, sequences=2, open=frozenset({"schedule"}))
    judged_plans = ask("auto", named).judged
    assert judged_plans
    for judged in judged_plans:
        assert judged.plan.zero_stage == 2
        shares = [
            replica.batch_share
            for pipeline in judged.plan.pipelines
            for stage in pipeline.stages
            for replica in stage.replicas
        ]
        assert all(share % 2 == 0 for share in shares)


@pytest.mark.exhaustive  # test_cli_search.py has another in CI
def test_the_order_of_nodes_changes_nothing() -> None:
    request = random_request(2)
    nodes = list(request.cluster.nodes)
    other = replace(request.cluster, nodes=in_order(reversed(nodes)))
    plans = [ask("auto", replace(request, cluster=c)).best.plan for c in (request.cluster, other)]
    assert plans[0] == plans[1]


@pytest.mark.long
def test_the_shortest_budget_is_enough_for_a_plan_that_fits() -> None:
    request = replace(random_request(2), budget_s=1e-6)
    plan = ask("auto", request, 1).best.plan
    assert fits(plan, used_cluster(plan, request.cluster))


@pytest.mark.long
def test_a_chip_that_holds_up_the_others_stays_idle_and_the_answer_says_so() -> None:
    fast, slow = load_chip("a-mini"), load_chip("c-mini")
    slow = replace(
        slow,
        compute=replace(slow.compute, efficiency=1e-4),
        memory=replace(slow.memory, bandwidth_bytes_per_s=1e5),
    )
    cluster = cluster_of(("a-mini", fast, 2), ("c-mini", slow, 1))
    request = Request(cluster=cluster, model=tiny_model(4), global_batch=8, open=OPEN)
    verdict = ask("auto", request)
    plan = verdict.best.plan
    assert idle_members(plan, cluster) == ["c-mini-0/0"]
    assert plan.members == ("a-mini-0/0", "a-mini-0/1")
    assert verdict.result is not None
    (note,) = verdict.result.notes
    assert "1 chip stays idle (c-mini-0/0)" in note


@pytest.mark.long
def test_little_memory_is_not_spent_on_large_micro_batches() -> None:
    nodes = [Node("v100", load_chip("v100"), range(8)), Node("b200", load_chip("b200"), range(1))]
    request = Request(
        cluster=Cluster("nine chips", in_order(nodes)),
        model=read_model("zorse-b-llama-13b"),
        global_batch=128,
        open=OPEN,
    )
    plan = ask("auto", request, 1).best.plan
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    assert not any(stage.recompute or stage.selective_recompute for stage in stages)


def five_chips_behind_slow_nics() -> Request:
    nodes = []
    for name, count, speed in (("a", 4, 0.74e9), ("a100-40gb", 1, 2.6e9)):
        chip = load_chip(name)
        chip = replace(chip, links=replace(chip.links, nic_bytes_per_s=speed))
        nodes += [Node(name, chip, range(1))] * count
    return Request(
        cluster=Cluster("five chips", in_order(nodes)),
        model=read_model("autohet-llama-6.7b"),
        global_batch=128,
        open=OPEN,
    )


def five_chips_of_two_makers() -> Request:
    """Where the best plan has its stages in an order that few fast plans have."""
    large, small = load_chip("gh200"), load_chip("a100-40gb")
    nodes = [Node("gh200", large, range(1)), *[Node("a100-40gb", small, range(2))] * 2]
    return Request(
        cluster=Cluster("five chips of two makers", in_order(nodes)),
        model=read_model("zorse-a-llama-7b"),
        global_batch=16,
        open=OPEN,
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("request_of", "allowed"),
    [(five_chips_behind_slow_nics, 1.03), (five_chips_of_two_makers, ALLOWED)],
)
def test_a_longer_search_finds_hardly_faster_plans(
    request_of: Callable[[], Request], allowed: float
) -> None:
    request = request_of()
    assert step_s(request) <= allowed * step_s(replace(request, budget_s=15.0))


def eight_chips_behind_slow_nics(**changes) -> tuple[Request, Plan]:
    """A request, and a plan for it that offloads activations of all layers to the hosts.

    changes: of each node.
    """
    chip = load_chip("a10g")
    chip = replace(chip, links=replace(chip.links, nic_bytes_per_s=3e9))
    node = replace(Node("a10g", chip, range(2)), **changes)
    request = Request(
        cluster=Cluster("8 chips", in_order([node] * 4)),
        model=read_model("zorse-a-llama-7b"),
        global_batch=128,
        open=OPEN,
    )
    stages = tuple(
        Stage(
            layers=(8 * s, 8 * s + 8),
            recompute=False,
            offload=True,
            ministages=4,
            replicas=tuple(
                Replica(ranks=(rank,), chip="a10g", batch_share=1) for rank in (2 * s, 2 * s + 1)
            ),
        )
        for s in range(4)
    )
    known = Plan(
        model=request.model,
        global_batch=128,
        micro_batch=2,
        schedule="interleaved-1f1b",
        zero_stage=2,
        pipelines=(Pipeline(micro_batches=64, stages=stages),),
    )
    validate(known)
    return request, known


@pytest.mark.timeout(600)
@pytest.mark.parametrize("quarters", sampled([4, 5], 2))
def test_activations_go_to_the_host_where_that_is_faster_than_computing_them_again(
    quarters: int,
) -> None:
    """No other planner offloads without recompute; more memory keeps such a plan possible."""
    request, known = eight_chips_behind_slow_nics()
    assert fits(known, request.cluster)
    (chip,) = {node.chip for node in request.cluster.nodes}
    capacity_bytes = chip.memory.capacity_bytes * quarters // 4
    larger = replace(chip, memory=replace(chip.memory, capacity_bytes=capacity_bytes))
    request = with_chips(request, lambda _: larger)
    assert step_s(request) <= simulate(known, request.cluster).step_s * (1 + 1e-9)


@pytest.mark.exhaustive
def test_no_more_goes_to_the_host_than_it_has_room_for() -> None:
    request, known = eight_chips_behind_slow_nics(host_memory_bytes=40 << 30)
    assert not fits(known, request.cluster)
    plan = ask("auto", request, 1).best.plan
    assert fits(plan, used_cluster(plan, request.cluster))


@pytest.mark.exhaustive
def test_many_chips_whose_number_no_degree_divides_have_a_plan() -> None:
    """The plan of 1,096 chips in 137 nodes, a prime number, is no slower than that of 1,024."""
    nodes = [Node("b", load_chip("b"), range(8))] * 137
    whole, part = (Cluster("many", in_order(some)) for some in (nodes, nodes[:128]))
    request = Request(cluster=whole, model=tiny_model(6), global_batch=4096, open=OPEN)
    assert ask("exact", request).error is not None
    judged = ask("auto", request, 1).best
    validate(judged.plan)
    least_s = ask("exact", replace(request, cluster=part)).best.simulation.step_s
    assert judged.simulation.step_s <= least_s * (1 + 1e-9)


# what should help never hurts


def with_chips(request: Request, change) -> Request:
    nodes = [replace(node, chip=change(node.chip)) for node in request.cluster.nodes]
    return replace(request, cluster=replace(request.cluster, nodes=in_order(nodes)))


def more_memory(request: Request) -> Request:
    name = request.cluster.chip_names()[-1]
    nodes = [
        replace(node, chip=_with_memory(node.chip)) if node.chip_name == name else node
        for node in request.cluster.nodes
    ]
    return replace(request, cluster=replace(request.cluster, nodes=in_order(nodes)))


def _with_memory(chip: ChipSpec) -> ChipSpec:
    return replace(chip, memory=replace(chip.memory, capacity_bytes=2 * 10**7))


def faster_chips(request: Request) -> Request:
    def faster(chip: ChipSpec) -> ChipSpec:
        memory = replace(chip.memory, bandwidth_bytes_per_s=1.5 * chip.memory.bandwidth_bytes_per_s)
        return replace(chip, memory=memory)

    return with_chips(request, faster)


def faster_links(request: Request) -> Request:
    def faster(chip: ChipSpec) -> ChipSpec:
        links = replace(chip.links, nic_bytes_per_s=2 * chip.links.nic_bytes_per_s)
        return replace(chip, links=links)

    return with_chips(request, faster)


def one_node_more(request: Request) -> Request:
    nodes = [*request.cluster.nodes, request.cluster.nodes[-1]]
    return replace(request, cluster=replace(request.cluster, nodes=in_order(nodes)))


def twice_the_nodes(request: Request) -> Request:
    nodes = [*request.cluster.nodes, *request.cluster.nodes]
    return replace(request, cluster=replace(request.cluster, nodes=in_order(nodes)))


HELPS = (more_memory, faster_chips, faster_links, one_node_more, twice_the_nodes)


def never_worse(seed: int) -> None:
    request = random_request(seed)
    before_s = step_s(request)
    for helped in HELPS:
        assert step_s(helped(request)) <= before_s * ALLOWED, (seed, helped.__name__)


@pytest.mark.parametrize("seed", sampled(range(2), 1, everyday=1))
def test_what_helps_never_makes_the_step_longer(seed: int) -> None:
    never_worse(seed)


def test_the_best_plan_for_two_chips_is_found_among_four() -> None:
    """It takes longer than plans for all of them until it is improved."""
    request = random_request(66)
    before_s = step_s(request)
    assert step_s(twice_the_nodes(request)) <= before_s * ALLOWED


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(2, 7))
def test_what_helps_never_makes_more_steps_longer(seed: int) -> None:
    never_worse(seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(7, 300))
def test_what_helps_never_makes_any_step_longer(seed: int) -> None:
    never_worse(seed)


@pytest.mark.parametrize("limit", sampled([2, 1], 1, everyday=1))
def test_no_group_is_larger_than_its_chips_allow(limit: int) -> None:
    """The memory of a chip makes two share the layer, by tensor parallelism where they may."""
    chip = load_chip("a-mini")
    memory = replace(chip.memory, capacity_bytes=80_000)
    chip = replace(chip, memory=memory, tp_limit=limit)
    request = Request(
        cluster=cluster_of(("x", chip, 2)),
        model=tiny_model(1, heads=4, kv_heads=4),
        global_batch=2,
        open=OPEN,
    )
    (pipeline,) = ask("auto", request, 1).best.plan.pipelines
    assert [stage.tp for stage in pipeline.stages] == [limit]
