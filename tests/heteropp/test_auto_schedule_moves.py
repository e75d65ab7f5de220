"""A plan under other schedules, and with ministages of equally many layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from clusters import cluster_of, tiny_model

from ditorch.chips import load_chip
from heteropp.description.plan import Pipeline, Plan, Replica, Stage, validate
from heteropp.description.schedules import Schedule
from heteropp.search.auto.changed import places, with_each
from heteropp.search.auto.freedom import Freedom
from heteropp.search.auto.moves import neighbours
from heteropp.search.auto.schedule_moves import schedules
from heteropp.search.auto.trials import Draft
from heteropp.search.planner import OPTIONS, Request

CLUSTER = cluster_of(("a-mini", load_chip("a-mini"), 8))


def plan_of(*pipelines: tuple[int, ...]) -> Plan:
    """A plan of stages of one chip each. pipelines: the layers of each one's stages."""
    rank = 0
    made = []
    for layers in pipelines:
        stages, first = [], 0
        for count in layers:
            replica = Replica(ranks=(rank,), chip="a-mini", batch_share=1)
            stages.append(
                Stage(layers=(first, first + count), recompute=False, replicas=(replica,))
            )
            rank, first = rank + 1, first + count
        made.append(Pipeline(micro_batches=8, stages=tuple(stages)))
    return Plan(
        model=tiny_model(sum(pipelines[0])),
        global_batch=8 * len(pipelines),
        micro_batch=1,
        schedule="1f1b",
        zero_stage=1,
        pipelines=tuple(made),
    )


def under_other_schedules(plan: Plan, **named: Any) -> list[Plan]:
    request = Request(
        cluster=CLUSTER,
        model=plan.model,
        global_batch=plan.global_batch,
        open=frozenset(OPTIONS).difference(named),
        **named,
    )
    freedom = Freedom(request)
    found = list(schedules(plan, freedom))
    near = {draft.plan for kind in neighbours(Draft(plan), freedom) for draft in kind}
    assert set(found) <= near
    assert len(set(found)) == len(found)
    for other in found:
        validate(other)
    return found


def interleaved(plan: Plan) -> list[tuple[tuple[int, int], ...]]:
    """The layers and ministages of each stage in interleaved neighbours."""
    return [
        tuple((stage.layer_count, stage.ministages) for _, _, stage in places(other))
        for other in under_other_schedules(plan)
        if other.schedule == "interleaved-1f1b"
    ]


@pytest.mark.parametrize(
    ("layers", "even", "ministages"),
    [
        ([(13, 11)], [12, 12], [12, 6, 4, 3, 2]),
        ([(12, 12)], [12, 12], [12, 6, 4, 3, 2]),
        ([(5, 7), (12,)], [6, 6, 12], [6, 3, 2]),
        ([(7, 5), (4, 5, 3)], [6, 6, 4, 4, 4], [2]),
        ([(12, 12), (7, 8, 9)], [12, 12, 8, 8, 8], [4, 2]),
    ],
)
def test_interleaved_stages_get_every_number_of_equal_ministages(
    layers: list[tuple[int, ...]], even: list[int], ministages: list[int]
) -> None:
    """The most ministages come first, beside those that every stage can have."""
    ways = interleaved(plan_of(*layers))
    equal = [way for way in ways if [held for held, _ in way] == even]
    counts = [count for way in equal for count in dict.fromkeys(count for _, count in way)]
    assert [count for count in counts if count > 4] == [count for count in ministages if count > 4]
    assert set(ministages) <= set(counts) <= {*ministages, 2, 3, 4}


@pytest.mark.parametrize("layers", [[(5, 8)], [(4, 8), (3, 3, 2, 2, 2)]])
def test_stages_keep_layers_that_cannot_be_divided_equally(layers: list[tuple[int, ...]]) -> None:
    expected = tuple(count for own in layers for count in own)
    assert {tuple(held for held, _ in way) for way in interleaved(plan_of(*layers))} == {expected}


@pytest.mark.parametrize(
    ("layers", "schedule", "counts"),
    [
        ((5, 1), "zb-v", {(4, 2)}),
        ((3, 1, 1, 3), "zb-v", {(2, 2, 2, 2)}),
        ((5, 1, 1), "zb-v", {(3, 2, 2)}),
        ((2, 1), "zb-v", set()),
        ((5, 1), "1f1b", set()),
        ((5, 1), "zb-h1", {(5, 1)}),
        ((5, 1), "chimera", {(5, 1)}),
        ((6, 1), "interleaved-1f1b", {(5, 2), (4, 3)}),
    ],
)
def test_stages_with_fewer_layers_than_ministages_get_more(
    layers: tuple[int, ...], schedule: Schedule, counts: set[tuple[int, ...]]
) -> None:
    found = under_other_schedules(plan_of(layers))
    assert {
        tuple(stage.layer_count for _, _, stage in places(other))
        for other in found
        if other.schedule == schedule
    } == counts


def test_a_schedule_that_the_request_names_is_the_only_one() -> None:
    for schedule in ("zb-h1", "interleaved-1f1b"):
        found = under_other_schedules(plan_of((6, 6)), schedule=schedule)
        assert {other.schedule for other in found} == {schedule}


def test_a_plan_of_equal_ministages_is_no_neighbour_of_itself() -> None:
    plan = plan_of((6, 6))
    for ministages in (2, 6):
        other = with_each(plan, lambda stage, count=ministages: replace(stage, ministages=count))
        own = replace(other, schedule="interleaved-1f1b")
        assert own not in under_other_schedules(own)
