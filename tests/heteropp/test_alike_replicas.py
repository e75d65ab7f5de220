"""Replicas that do the same are compiled and played once: no time differs from playing all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
from clusters import tiny_model
from invented import Invent

from heteropp.cost.stage_time import StageShape, Time
from heteropp.description.chips import ChipSpec, load_chip
from heteropp.description.cluster import Cluster, Link, Node
from heteropp.description.fabric import Fabric, LinkEntry
from heteropp.description.plan import Pipeline, Plan, Replica, Schedule, Stage, validate
from heteropp.models.spec import ModelSpec
from heteropp.search.auto.changed import with_each
from heteropp.search.auto.trials import passes
from heteropp.simulator import placement, seat_times
from heteropp.simulator import simulate as simulator
from heteropp.simulator.program import compile_plan
from heteropp.simulator.simulate import Simulation, simulate


def stage_time(
    model: ModelSpec, shape: StageShape, chip: ChipSpec, inside: Link, across: Link, *_, **__
) -> Time:
    """Seconds that differ with what replicas take, with their chips and with their links."""
    work_s = 0.001 * shape.layers * shape.rows(model) * chip.compute.efficiency
    seconds = dict(
        forward_s=work_s + 1 / inside.bytes_per_s,
        backward_s=2 * work_s,
        backward_input_s=work_s,
        backward_weight_s=work_s,
        reduce_s=1 / across.bytes_per_s,
        update_s=shape.layers * work_s,
    )
    return Time(**{**dict.fromkeys((f.name for f in fields(Time)), 0.0), **seconds})


def nodes_of(chip: str, sizes: Sequence[int], nics: int, places: Sequence[str]) -> list[Node]:
    spec = load_chip(chip)
    links = replace(spec.links, nics_per_node=nics, nic_bytes_per_s=2e4, nic_latency_s=0.01)
    return [
        Node(chip, replace(spec, links=links), range(size), region=place)
        for size, place in zip(sizes, places, strict=True)
    ]


def cluster_of(nodes: Sequence[Node]) -> Cluster:
    """The nodes in this order; two regions are joined by a slow link."""
    placed, first = [], 0
    for node in nodes:
        placed.append(replace(node, ranks=range(first, first + len(node.ranks))))
        first += len(node.ranks)
    places = {(node.region, node.switch) for node in nodes}
    link = LinkEntry(between=("one", "two"), latency_s=0.05, bytes_per_s=1e4)
    links = (link,) if len({node.region for node in nodes}) > 1 else ()
    return Cluster("many", tuple(placed), Fabric.of(places, links))


def drawn(seed: int) -> tuple[Plan, Cluster]:
    """A plan whose replicas may lie across nodes, share NICs, and take unlike parts of sequences
    and micro-batches.
    """
    generator = random.Random(seed)
    schedule: Schedule = generator.choice(
        ["1f1b", "gpipe", "zb-h1", "interleaved-1f1b", "zb-v", "chimera"]
    )
    ministages = 2 if schedule in ("interleaved-1f1b", "zb-v", "chimera") else 1
    count = generator.choice([2, 4] if schedule == "chimera" else [2, 3])
    tokens = tiny_model().sequence_length
    in_slices = schedule in ("1f1b", "gpipe") and generator.random() < 0.3
    nodes: list[Node] = []
    pipelines: list[Pipeline] = []
    for _ in range(generator.choice([1, 1, 2])):
        stages: list[Stage] = []
        for s in range(count):
            micro_batch = generator.choice([8, 8, 4]) if s and not in_slices else 8
            dp, tp = generator.choice([1, 2, 4, micro_batch]), generator.choice([1, 2])
            cp = 2 if generator.random() < 0.2 and not in_slices else 1
            chips, first = dp * tp * cp, sum(len(node.ranks) for node in nodes)
            nodes += drawn_nodes(generator, ("a-mini", "b-mini")[s % 2], chips, seed % 3 == 0)
            ranks = list(range(first, first + chips))
            if generator.random() < 0.2:
                generator.shuffle(ranks)
            shares = [micro_batch // dp] * dp
            if dp > 1 and shares[0] > 1 and generator.random() < 0.2:
                shares[0], shares[1] = shares[0] - 1, shares[1] + 1
            replicas = tuple(
                Replica(
                    ranks=tuple(sorted(ranks[r * tp * cp : (r + 1) * tp * cp])),
                    chip=nodes[-1].chip_name,
                    batch_share=share,
                    token_shares=(tokens // 2, tokens - tokens // 2) if cp > 1 else None,
                )
                for r, share in enumerate(shares)
            )
            stages.append(
                Stage(
                    layers=(2 * s, 2 * s + 2),
                    recompute=generator.random() < 0.2,
                    ministages=ministages,
                    sequence_parallel=tp > 1 and generator.random() < 0.3,
                    replicas=replicas,
                )
            )
        slices = (tokens // 2, tokens // 4, tokens // 4) if in_slices else None
        pipelines.append(Pipeline(micro_batches=4, stages=tuple(stages), token_slices=slices))
    plan = Plan(
        model=tiny_model(2 * count),
        global_batch=4 * 8 * len(pipelines),
        micro_batch=8,
        schedule=schedule,
        zero_stage=1,
        resharding=generator.choice(["all-gather", "broadcast", "direct"]),
        overlap=generator.random() < 0.8,
        pipelines=tuple(pipelines),
    )
    validate(plan)
    return plan, cluster_of(nodes)


def drawn_nodes(generator: random.Random, chip: str, chips: int, far: bool) -> list[Node]:
    """Nodes of one size, with unlike NICs, and in two regions where they may be far."""
    size = generator.choice([n for n in (1, 2, 4) if chips % n == 0])
    places = [generator.choice(["one", "one", "two"]) if far else "" for _ in range(chips // size)]
    nodes = nodes_of(chip, [size] * (chips // size), generator.choice([1, 2, 4]), places)
    if generator.random() < 0.2:
        slower = replace(nodes[0].chip.links, nic_bytes_per_s=1.3e4)
        nodes[0] = replace(nodes[0], chip=replace(nodes[0].chip, links=slower))
    return nodes


def played_whole(monkeypatch: pytest.MonkeyPatch, plan: Plan, cluster: Cluster, **of) -> Simulation:
    with monkeypatch.context() as patch:
        patch.setattr(
            simulator, "compile_plan", lambda *given, fold: compile_plan(*given, fold=False)
        )
        return simulate(plan, cluster, **of)


def test_no_time_of_any_replica_differs(
    monkeypatch: pytest.MonkeyPatch, invent_times: Invent
) -> None:
    invent_times(stage_time)
    folded = 0
    for seed in range(60):
        plan, cluster = drawn(seed)
        slowdown = {plan.world_size // 2: 1.5} if seed % 5 == 0 else None
        for emulated in (False, True):
            found = simulate(plan, cluster, emulated=emulated, slowdown=slowdown)
            whole = played_whole(monkeypatch, plan, cluster, emulated=emulated, slowdown=slowdown)
            assert found.step_s == whole.step_s, seed
            assert found.timing == whole.timing, seed
            folded += len(found.program.actors) < len(whole.program.actors)
    assert 15 < folded < 100


def test_plans_on_the_same_chips_have_their_own_times(invent_times: Invent) -> None:
    """A plan with and without recompute shares a placement, and has the times it has alone."""
    invent_times(stage_time)
    for seed in range(40):
        plan, cluster = drawn(seed)
        again = with_each(plan, lambda stage: replace(stage, recompute=not stage.recompute))
        for other in (again, plan):
            found = simulate(other, cluster)
            placement._known.cache_clear()
            seat_times._known.cache_clear()
            assert found.timing == simulate(other, cluster).timing, seed


def test_replicas_with_nics_of_their_own_are_one(invent_times: Invent) -> None:
    invent_times(stage_time)
    plan, cluster = pairs(nics=8)
    found = simulate(plan, cluster)
    assert len(found.program.seats) == 16
    assert len(found.program.actors) == 2
    assert found.program.actor_of == [0] * 8 + [1] * 8
    assert passes(found) == 2 * 4  # of as many micro-batches


def test_switches_that_no_link_joins_tell_no_replicas_apart(
    invent_times: Invent,
) -> None:
    invent_times(stage_time)
    plan, cluster = pairs(nics=8)
    nodes = [replace(node, switch=f"s{i % 2}") for i, node in enumerate(cluster.nodes)]
    assert len(simulate(plan, cluster_of(nodes)).program.actors) == 2


def test_replicas_that_share_a_nic_are_played_with_what_they_share_it_with(
    invent_times: Invent,
) -> None:
    invent_times(stage_time)
    plan, cluster = pairs(nics=1)
    found = simulate(plan, cluster)
    assert len(found.program.actors) == 8  # of one node of each type
    assert found.step_s > simulate(*pairs(nics=8)).step_s


def pairs(nics: int) -> tuple[Plan, Cluster]:
    """Eight replicas of one rank, on two nodes, that send to eight on two others."""
    nodes = [
        node for chip in ("a-mini", "b-mini") for node in nodes_of(chip, [4, 4], nics, [""] * 2)
    ]
    stages = [
        Stage(
            layers=(s, s + 1),
            recompute=False,
            replicas=tuple(Replica(ranks=(8 * s + r,), chip=chip, batch_share=1) for r in range(8)),
        )
        for s, chip in enumerate(("a-mini", "b-mini"))
    ]
    plan = Plan(
        model=tiny_model(2),
        global_batch=32,
        micro_batch=8,
        schedule="1f1b",
        zero_stage=1,
        pipelines=(Pipeline(micro_batches=4, stages=tuple(stages)),),
    )
    return plan, cluster_of(nodes)
