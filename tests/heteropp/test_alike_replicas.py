"""Replicas that do the same are compiled and played once: no time differs from playing all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
from clusters import tiny_model

from heteropp.cost import planned
from heteropp.cost.stage_time import StageShape, Time
from heteropp.description.chips import ChipSpec, load_chip
from heteropp.description.cluster import Cluster, Link, Node
from heteropp.description.fabric import Fabric, LinkEntry
from heteropp.description.plan import Pipeline, Plan, Replica, Stage, validate
from heteropp.models.spec import ModelSpec
from heteropp.simulator import simulate as simulator
from heteropp.simulator.program import compile_plan
from heteropp.simulator.simulate import Simulation, simulate


def stage_time(
    _model: ModelSpec, shape: StageShape, chip: ChipSpec, inside: Link, across: Link, *_, **__
) -> Time:
    """Seconds that differ with all that a replica's time depends on."""
    work_s = 0.02 * shape.layers * shape.sequences * chip.compute.efficiency
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
    regions = {(node.region, "") for node in nodes}
    link = LinkEntry(between=("one", "two"), latency_s=0.05, bytes_per_s=1e4)
    return Cluster("many", tuple(placed), Fabric.of(regions, (link,) if len(regions) > 1 else ()))


def drawn(seed: int) -> tuple[Plan, Cluster]:
    """A plan of two or three stages, whose replicas may lie across nodes and share NICs."""
    generator = random.Random(seed)
    dps = [generator.choice([1, 2, 4, 4, 8]) for _ in range(generator.choice([2, 3]))]
    tps = [generator.choice([1, 2]) for _ in dps]
    nodes: list[Node] = []
    for chip, dp, tp in zip(("a-mini", "b-mini", "a-mini"), dps, tps, strict=False):
        size = generator.choice([n for n in (1, 2, 4) if dp * tp % n == 0])
        count = dp * tp // size
        places = [generator.choice(["one", "one", "two"] if seed % 3 == 0 else [""])] * count
        nodes += nodes_of(chip, [size] * count, generator.choice([1, 2, 4]), places)
    cluster = cluster_of(nodes)
    micro_batch, first, stages = 8, 0, []
    for s, (dp, tp) in enumerate(zip(dps, tps, strict=True)):
        ranks = list(range(first, first + dp * tp))
        if generator.random() < 0.3:  # replicas may lie on unlike nodes, and in any order
            generator.shuffle(ranks)
        first += dp * tp
        shares = [micro_batch // dp] * dp
        if dp > 1 and shares[0] > 1 and generator.random() < 0.2:
            shares[0], shares[1] = shares[0] - 1, shares[1] + 1
        stages.append(
            Stage(
                layers=(2 * s, 2 * s + 2),
                recompute=False,
                replicas=tuple(
                    Replica(
                        ranks=tuple(sorted(ranks[r * tp : (r + 1) * tp])),
                        chip=cluster.node(ranks[0]).chip_name,
                        batch_share=share,
                    )
                    for r, share in enumerate(shares)
                ),
            )
        )
    plan = Plan(
        model=tiny_model(2 * len(stages)),
        global_batch=4 * micro_batch,
        micro_batch=micro_batch,
        schedule=generator.choice(["1f1b", "gpipe", "zb-h1"]),
        zero_stage=1,
        resharding=generator.choice(["all-gather", "broadcast", "direct"]),
        pipelines=(Pipeline(micro_batches=4, stages=tuple(stages)),),
    )
    validate(plan)
    return plan, cluster


def played_whole(monkeypatch: pytest.MonkeyPatch, plan: Plan, cluster: Cluster, **of) -> Simulation:
    with monkeypatch.context() as patch:
        patch.setattr(
            simulator, "compile_plan", lambda *given, fold: compile_plan(*given, fold=False)
        )
        return simulate(plan, cluster, **of)


def test_no_time_of_any_replica_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "stage_time", stage_time)
    folded = 0
    for seed in range(150):
        plan, cluster = drawn(seed)
        slow = {plan.world_size // 2: 1.5} if seed % 5 == 0 else None
        for emulated in (False, True):
            found = simulate(plan, cluster, emulated=emulated, slowdown=slow)
            whole = played_whole(monkeypatch, plan, cluster, emulated=emulated, slowdown=slow)
            assert found.step_s == whole.step_s, seed
            assert found.timing == whole.timing, seed
            folded += len(found.program.actors) < len(whole.program.actors)
    assert 50 < folded < 250


def test_pipelines_on_nodes_of_their_own_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "stage_time", stage_time)
    plan, cluster = pairs(nics=8)
    found = simulate(plan, cluster)
    assert len(found.program.seats) == 16
    assert len(found.program.actors) == 2
    assert found.program.actor_of == [0] * 8 + [1] * 8


def test_replicas_that_share_a_nic_are_played_with_what_they_share_it_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planned, "stage_time", stage_time)
    plan, cluster = pairs(nics=1)
    found = simulate(plan, cluster)
    assert len(found.program.actors) == 8  # of one node of each type
    alone, _ = pairs(nics=8)
    assert found.step_s > simulate(alone, pairs(nics=8)[1]).step_s


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
