"""The neighbours of a plan that let idle chips work or put a stage elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
from clusters import cluster_of, tiny_model

from ditorch.chips import load_chip
from heteropp.description.plan import Pipeline, Plan, Replica, Stage
from heteropp.description.schedules import Schedule
from heteropp.search.auto.changed import with_each, with_one, with_stages
from heteropp.search.auto.freedom import Freedom
from heteropp.search.auto.moves import neighbours
from heteropp.search.auto.trials import Draft, ranks_of
from heteropp.search.planner import OPTIONS, Request

LAYERS = 8
CLUSTER = cluster_of(("a-mini", load_chip("a-mini"), 2), ("c-mini", load_chip("c-mini"), 3))
REQUEST = Request(
    cluster=CLUSTER, model=tiny_model(LAYERS), global_batch=8, open=frozenset(OPTIONS)
)


def pipeline_of(*stages: tuple[int, ...]) -> Plan:
    """A plan of one pipeline whose stages hold two layers, but for the last, which holds the rest.

    stages: the ranks of each, which are one tensor-parallel group.
    """
    firsts = [2 * s for s in range(len(stages))]
    return Plan(
        model=REQUEST.model,
        global_batch=8,
        micro_batch=2,
        schedule="1f1b",
        zero_stage=1,
        pipelines=(
            Pipeline(
                micro_batches=4,
                stages=tuple(
                    Stage(
                        layers=(first, last),
                        recompute=False,
                        replicas=(Replica(ranks=ranks, chip=chip_of(ranks), batch_share=2),),
                    )
                    for first, last, ranks in zip(
                        firsts, [*firsts[1:], LAYERS], stages, strict=True
                    )
                ),
            ),
        ),
    )


def chip_of(ranks: tuple[int, ...]) -> str:
    return CLUSTER.node(ranks[0]).chip_name


def neighbouring(plan: Plan) -> list[Plan]:
    """All neighbours of a plan; each has every layer, and no rank twice."""
    found = []
    for kind in neighbours(Draft(plan), Freedom(REQUEST)):
        for draft in kind:
            stages = draft.plan.pipelines[0].stages
            assert [s.layers[0] for s in stages] == [0, *(s.layers[1] for s in stages[:-1])]
            assert stages[-1].layers[1] == LAYERS
            ranks = ranks_of(draft.plan)
            assert len(set(ranks)) == len(ranks)
            found.append(draft.plan)
    return found


def places_of(plans: list[Plan], ranks: tuple[int, ...]) -> set[tuple[int, int]]:
    """How many stages, and which of them is those ranks' own."""
    return {
        (len(stages), s)
        for plan in plans
        for stages in [plan.pipelines[0].stages]
        for s, stage in enumerate(stages)
        if [replica.ranks for replica in stage.replicas] == [ranks]
    }


def test_idle_chips_become_a_stage_at_every_place() -> None:
    plans = neighbouring(pipeline_of((0,), (1,)))
    for ranks in ((2,), (2, 3)):
        assert {(3, 0), (3, 1), (3, 2)} <= places_of(plans, ranks)


def test_idle_chips_become_a_replica_of_a_stage_of_as_large_groups() -> None:
    plans = neighbouring(pipeline_of((0,), (1,)))
    joined = [
        plan
        for plan in plans
        if any(2 in replica.ranks for replica in plan.pipelines[0].stages[0].replicas)
        and plan.pipelines[0].stages[0].dp == 2
    ]
    assert joined
    for plan in joined:
        assert sum(replica.batch_share for replica in plan.pipelines[0].stages[0].replicas) == 2


def test_a_stage_goes_elsewhere() -> None:
    plans = neighbouring(pipeline_of((0,), (2, 3), (1,), (4,)))
    orders = {tuple(s.replicas[0].ranks for s in p.pipelines[0].stages) for p in plans}
    assert ((2, 3), (1,), (4,), (0,)) in orders  # the first one goes last
    assert ((4,), (0,), (2, 3), (1,)) in orders  # the last one goes first
    assert ((4,), (2, 3), (1,), (0,)) in orders  # the two change places


def test_layers_move_in_one_pipeline_or_in_all_that_are_cut_alike() -> None:
    first, second, third = (pipeline_of(*ranks) for ranks in (((0,), (2,)), ((1,), (3,)), ((4,),)))
    pipelines = tuple(plan.pipelines[0] for plan in (first, second, third))
    found = {
        tuple(tuple(stage.layer_count for stage in pipeline.stages) for pipeline in made.pipelines)
        for made in neighbouring(replace(first, global_batch=24, pipelines=pipelines))
        if made.schedule == "1f1b"
    }
    for counts in ((1, 7), (4, 4), (6, 2)):
        assert {(counts, counts, (8,)), (counts, (2, 6), (8,)), ((2, 6), counts, (8,))} <= found
    assert ((3, 5), (4, 4), (8,)) not in found


def test_smaller_micro_batches_leave_room_to_compute_nothing_again() -> None:
    plan = pipeline_of((0, 1), (2,))
    for again in (True, False):
        stages = [
            replace(
                stage,
                recompute=again,
                replicas=tuple(replace(replica, batch_share=4) for replica in stage.replicas),
            )
            for stage in plan.pipelines[0].stages
        ]
        larger = with_stages(replace(plan, micro_batch=4), 0, stages)
        pipeline = replace(larger.pipelines[0], micro_batches=2)
        found = neighbouring(replace(larger, pipelines=(pipeline,)))
        ways = {
            (p.micro_batch, p.pipelines[0].micro_batches, p.pipelines[0].stages[0].recompute)
            for p in found
            if len({stage.recompute for stage in p.pipelines[0].stages}) == 1
        }
        expected = {(2, 4, False), (2, 4, again), (1, 8, False) if again else (2, 4, False)}
        assert {way for way in ways if way[0] < 4} == expected


def test_ministages_are_offloaded_instead_of_computed_again() -> None:
    plan = with_each(pipeline_of((0, 1), (2,)), lambda stage: replace(stage, recompute=True))
    for ministages in (1, 2):
        found = neighbouring(with_ministages(plan, ministages))
        interleaved = [p for p in found if p.pipelines[0].stages[0].ministages > 1]
        ways = {
            tuple((stage.offload, stage.recompute) for stage in p.pipelines[0].stages)
            for p in interleaved
        }
        assert ((True, False), (True, False)) in ways
        # one stage alone, where the plan interleaves already
        assert (((True, False), (False, True)) in ways) == (ministages > 1)
        assert all(not s.offload for p in found for s in p.pipelines[0].stages if s.ministages == 1)


@pytest.mark.parametrize("ministages", [1, 2])
def test_groups_that_become_smaller_may_offload_at_once(ministages: int) -> None:
    plan = with_ministages(pipeline_of((0, 1), (2, 3)), ministages)
    plain = {((1, False), (1, False)), ((1, False), (2, False)), ((2, False), (1, False))}
    offloaded = {((1, True), (1, True)), ((1, True), (2, False)), ((2, False), (1, True))}
    assert other_degrees(plan) == plain | (offloaded if ministages > 1 else set())


def test_only_groups_that_become_smaller_offload_at_once() -> None:
    """Not those that become larger, nor those that stay."""
    plan = pipeline_of((0, 1), (2,))
    second = plan.pipelines[0].stages[1]
    replicas = tuple(Replica(ranks=(rank,), chip="c-mini", batch_share=1) for rank in (2, 3))
    plan = with_one(plan, 0, 1, replace(second, replicas=replicas))
    plain = {((1, False), (1, False)), ((2, False), (2, False))}
    assert other_degrees(with_ministages(plan, 2)) == plain | {((1, True), (1, False))}


def with_ministages(plan: Plan, ministages: int) -> Plan:
    schedule: Schedule = "interleaved-1f1b" if ministages > 1 else "1f1b"
    interleaved = with_each(plan, lambda stage: replace(stage, ministages=ministages))
    return replace(interleaved, schedule=schedule)


def other_degrees(plan: Plan) -> set[tuple[tuple[int, bool], ...]]:
    """The tp of each stage, and whether it offloads, of neighbours that give the same chips other
    degrees.
    """
    degrees = [stage.tp for stage in plan.pipelines[0].stages]
    return {
        tuple((stage.tp, stage.offload) for stage in stages)
        for other in neighbouring(plan)
        for stages in [other.pipelines[0].stages]
        if other.schedule == plan.schedule and ranks_by_stage(other) == ranks_by_stage(plan)
        if [stage.tp for stage in stages] != degrees
    }


def ranks_by_stage(plan: Plan) -> list[list[int]]:
    return [
        sorted(rank for replica in stage.replicas for rank in replica.ranks)
        for stage in plan.pipelines[0].stages
    ]


@pytest.mark.parametrize(
    ("schedule", "held", "others"),
    [("gpipe", 1, {2, 4}), ("gpipe", 3, {2, 4}), ("interleaved-1f1b", 4, {3, 5, 8})],
)
def test_stages_get_more_and_fewer_ministages(
    schedule: Schedule, held: int, others: set[int]
) -> None:
    """One more, one less, or as many as layers, of which a stage of two has four, of one eight."""
    plan = pipeline_of((0,)) if held == 4 else pipeline_of((0,), (1,))
    layers = LAYERS // len(plan.pipelines[0].stages)
    stages = [
        replace(stage, layers=(s * layers, (s + 1) * layers), ministages=held)
        for s, stage in enumerate(plan.pipelines[0].stages)
    ]
    plan = replace(with_stages(plan, 0, stages), schedule=schedule)
    counts = {
        tuple(stage.ministages for stage in other.pipelines[0].stages)
        for other in neighbouring(plan)
        if other.schedule == schedule
    }
    assert {(count,) * len(stages) for count in others} <= counts
