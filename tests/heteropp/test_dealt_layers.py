"""Layers are dealt to stages of unlike chips so that the busiest one has the least work."""

from __future__ import annotations

import itertools
import random

import pytest
from clusters import random_chip, tiny_model

from heteropp.description.cluster import Cluster, Node, in_order
from heteropp.description.plan import Pipeline, Plan, Replica, Schedule, Stage
from heteropp.search.auto.busy import balanced
from heteropp.simulator.simulate import simulate

LAYERS = 12
CHIPS = "abc"


def plan_of(counts: tuple[int, ...], schedule: Schedule, ministages: int) -> Plan:
    spans = itertools.pairwise(itertools.accumulate(counts, initial=0))
    stages = tuple(
        Stage(
            layers=span,
            recompute=False,
            ministages=ministages,
            replicas=(Replica(ranks=(rank,), chip=CHIPS[rank], batch_share=1),),
        )
        for rank, span in enumerate(spans)
    )
    return Plan(
        model=tiny_model(LAYERS),
        global_batch=4,
        micro_batch=1,
        schedule=schedule,
        zero_stage=1,
        pipelines=(Pipeline(micro_batches=4, stages=stages),),
    )


def most_work_s(plan: Plan, cluster: Cluster) -> float:
    simulation = simulate(plan, cluster)
    return max(share.work for share in simulation.shares) * simulation.step_s


@pytest.mark.parametrize(
    ("schedule", "ministages"), [("1f1b", 1), ("interleaved-1f1b", 2), ("zb-v", 2)]
)
def test_no_other_deal_gives_the_busiest_stage_less_work(
    schedule: Schedule, ministages: int
) -> None:
    generator = random.Random(schedule)
    nodes = [Node(name, random_chip(generator), range(1)) for name in CHIPS]
    cluster = Cluster("three", in_order(nodes))
    even = plan_of((4, 4, 4), schedule, ministages)
    dealt = balanced(even, cluster)
    every = [
        plan_of(counts, schedule, ministages)
        for counts in itertools.product(range(ministages, LAYERS), repeat=len(CHIPS))
        if sum(counts) == LAYERS
    ]
    least_s = min(most_work_s(plan, cluster) for plan in every)
    assert most_work_s(dealt, cluster) <= least_s * (1 + 1e-9)
    assert most_work_s(even, cluster) > least_s * 1.1
