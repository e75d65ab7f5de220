"""Layers are dealt to stages of unlike chips so that the busiest one has the least work; and stages
join or part all at once.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from clusters import random_chip, tiny_model

from heteropp.description.cluster import Cluster, Node, in_order
from heteropp.description.plan import Pipeline, Plan, Replica, Schedule, Stage, validate
from heteropp.search.auto.busy import balanced
from heteropp.search.auto.freedom import Freedom
from heteropp.search.auto.moves import neighbours
from heteropp.search.auto.trials import Draft
from heteropp.search.planner import Request
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


def test_one_move_joins_all_stages_of_a_chain_in_pairs() -> None:
    chip = random_chip(random.Random("pairs"))
    cluster = Cluster("four", in_order([Node("a", chip, range(4))]))
    request = Request(cluster=cluster, model=tiny_model(4), global_batch=4)
    stages = tuple(
        Stage(
            layers=(rank, rank + 1),
            recompute=False,
            replicas=(Replica(ranks=(rank,), chip="a", batch_share=2),),
        )
        for rank in range(4)
    )
    chain = replace(
        plan_of((4, 4, 4), "1f1b", 1),
        model=request.model,
        micro_batch=2,
        pipelines=(Pipeline(micro_batches=2, stages=stages),),
    )
    pairs = set()
    for draft in itertools.chain(*neighbours(Draft(chain), Freedom(request))):
        (pipeline,) = draft.plan.pipelines
        if [stage.layers for stage in pipeline.stages] == [(0, 2), (2, 4)]:
            validate(draft.plan)
            pairs |= {(stage.dp, stage.tp) for stage in pipeline.stages}
    assert pairs == {(2, 1), (1, 2)}
