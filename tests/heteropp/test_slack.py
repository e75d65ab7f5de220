"""How much slack the default planner gives stages: as much as pays, and as memory holds."""

from __future__ import annotations

from dataclasses import replace

from clusters import cluster_of, tiny_model

from ditorch.chips import load_chip
from heteropp.cost.capacity import check_memory
from heteropp.cost.planned import rank_memory
from heteropp.description.cluster import Cluster
from heteropp.description.plan import Pipeline, Plan, Replica, Stage
from heteropp.search.judge import ask
from heteropp.search.planner import Request
from heteropp.search.slack import with_slack
from heteropp.simulator.simulate import simulate

STAGES = 4


def cluster_with(first_bytes: int, other_bytes: int, latency_s: float = 0.0) -> Cluster:
    """A chip for each stage; the memory of the first, and of the others, and of all links."""
    chip = load_chip("a-mini")
    links = replace(chip.links, intra_node_latency_s=latency_s, nic_latency_s=latency_s)
    chip = replace(chip, links=links)
    first, other = (
        replace(chip, memory=replace(chip.memory, capacity_bytes=size))
        for size in (first_bytes, other_bytes)
    )
    return cluster_of(("x", first, 1), ("y", other, STAGES - 1))


def plan_of() -> Plan:
    stages = tuple(
        Stage(
            layers=(s, s + 1),
            recompute=False,
            replicas=(Replica(ranks=(s,), chip="x", batch_share=1),),
        )
        for s in range(STAGES)
    )
    return Plan(
        model=tiny_model(STAGES, hidden=64, intermediate=192, sequence_length=64),
        global_batch=8,
        micro_batch=1,
        schedule="1f1b",
        zero_stage=1,
        pipelines=(Pipeline(micro_batches=8, stages=stages),),
    )


def slack_of(plan: Plan) -> list[int]:
    return [stage.slack for stage in plan.pipelines[0].stages]


def test_stages_put_off_as_much_as_memory_holds() -> None:
    plan, roomy = plan_of(), cluster_with(1 << 30, 1 << 30)
    loose = with_slack(plan, roomy)
    assert slack_of(loose) == [0, 1, 2, 3]
    assert simulate(loose, roomy).step_s < simulate(plan, roomy).step_s
    # with room for all that the last stage puts off, and no more, those before it put off fewer
    held = [memory.total for memory in rank_memory(loose)]
    assert held[3] < held[2] < held[1] < held[0]
    tight = cluster_with(held[0], held[3])
    found = with_slack(plan, tight)
    check_memory(found, tight)
    assert slack_of(found) == [0, 0, 1, 3]
    # a stage that runs ahead fills the next, which may have no slack of its own to give up
    firm = [memory.total for memory in rank_memory(plan)]
    narrow = cluster_with(1 << 30, max(firm[1:]) + 1000)
    for ahead in (0, 1, 2):
        check_memory(with_slack(plan, narrow, ahead), narrow)


def test_forwards_run_ahead_where_messages_take_long() -> None:
    plan, near = plan_of(), cluster_with(1 << 30, 1 << 30)
    far = cluster_with(1 << 30, 1 << 30, latency_s=simulate(plan, near).step_s / 32)
    assert slack_of(with_slack(plan, near, 1)) == [1, 2, 3, 3]
    gains = [
        simulate(with_slack(plan, cluster), cluster).step_s
        / simulate(with_slack(plan, cluster, 1), cluster).step_s
        for cluster in (near, far)
    ]
    assert gains[1] > max(gains[0], 1.02)


def test_the_default_planner_takes_it_where_it_pays() -> None:
    cluster = cluster_of(("x", load_chip("a-mini"), 1), ("y", load_chip("b-mini"), 1))
    request = Request(cluster=cluster, model=plan_of().model, global_batch=8)
    best = ask("exact", request, 1).best
    firm = replace(
        best.plan,
        pipelines=tuple(
            replace(p, stages=tuple(replace(stage, slack=0) for stage in p.stages))
            for p in best.plan.pipelines
        ),
    )
    assert any(slack_of(best.plan))
    assert best.simulation.step_s < simulate(firm, cluster).step_s
    assert not any(slack_of(ask("heteroauto", request, 1).best.plan))  # as published
