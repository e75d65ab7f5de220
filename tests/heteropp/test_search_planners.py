"""Planners heteroauto and uniform against brute force and the exact planner; what would help."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from brute_force import BruteForce, One, random_request
from clusters import cluster_of, tiny_model
from invented import invented_traces_alone

from ditorch.chips import load_chip
from heteropp.cost.capacity import check_memory
from heteropp.description.plan import validate
from heteropp.search import exact, heteroauto, nearest, space, uniform
from heteropp.search.planner import Request, SearchError


@pytest.fixture(autouse=True)
def invented_traces() -> Iterator[None]:
    with invented_traces_alone():
        yield


def cost_s(planner, request: Request) -> float | None:
    try:
        result = planner.search(request)
    except SearchError:
        return None
    brute = BruteForce(request)
    validate(result.best.plan)
    check_memory(result.best.plan, request.cluster)
    assert brute.plan_cost_s(result.best.plan) == pytest.approx(result.best.cost_s, rel=1e-9)
    assert result.lower_bound_s <= result.best.cost_s * (1 + 1e-12)
    assert result.steps > 0
    return result.best.cost_s


def test_heteroauto_finds_what_fits_and_never_beats_the_exact_planner(monkeypatch) -> None:
    generator = random.Random("heteroauto")
    found = optimal = 0
    for _ in range(30):
        monkeypatch.setattr(space, "SUBGROUP", generator.choice([2, 4, 128]))
        request = replace(random_request(generator), uneven_layers=False, stage_degrees=False)
        theirs_s, best_s = cost_s(heteroauto, request), cost_s(exact, request)
        if theirs_s is None:
            continue  # its heuristics may miss what there is
        assert best_s is not None
        assert theirs_s >= best_s * (1 - 1e-9)
        found += 1
        optimal += theirs_s <= best_s * (1 + 1e-9)
    assert found > 8 and optimal > found / 2


def test_uniform_is_the_best_of_all_uniform_plans() -> None:
    generator = random.Random("uniform")
    compared = 0
    while compared < 12:
        request = replace(random_request(generator), stage_degrees=False)
        brute = BruteForce(request)
        costs = [
            cost
            for replicas, stages in every_uniform_plan(request)
            if (cost := brute.cost_s(replicas, stages)) is not None
        ]
        if not costs:
            assert cost_s(uniform, request) is None
            continue
        assert cost_s(uniform, request) == pytest.approx(min(costs), rel=1e-9)
        compared += 1


def every_uniform_plan(request: Request):
    """Written down the slow way: a stage more layers on the first or on the last stages."""
    cluster, layers = request.cluster, request.model.layers
    types = [cluster.node(rank).chip_name for rank in range(cluster.world_size)]
    names = cluster.chip_names()
    slots = request.global_batch // request.sequences
    if request.global_batch % request.sequences:
        return
    limits = [cluster.chip(rank).tp_limit for rank in range(cluster.world_size)]
    sizes = [len(cluster.node(rank).ranks) for rank in range(cluster.world_size)]
    for dp in (dp for dp in range(1, slots + 1) if slots % dp == 0):
        for tp in (1, 2, 4):
            if tp > min(limits) or any(size % tp for size in sizes):
                continue
            held = [types[i : i + tp * dp] for i in range(0, len(types), tp * dp)]
            stages = len(held)
            if len(types) % (tp * dp) or any(len(set(h)) > 1 for h in held) or stages > layers:
                continue
            size, longer = divmod(layers, stages)
            for recompute in (False, True):
                for first in (0, stages - longer):
                    yield (
                        dp,
                        tuple(
                            One(
                                names.index(held[s][0]),
                                s * tp * dp,
                                tp,
                                dp,
                                size + (first <= s < first + longer),
                                recompute,
                            )
                            for s in range(stages)
                        ),
                    )


def test_groups_of_128_chips_have_degrees_of_their_own() -> None:
    """The second stage of section 4.3.3: a plan with two degrees on chips of one type."""
    slow = load_chip("a")
    cluster = cluster_of(*[("a", slow, 16)] * 24)
    model = tiny_model(12)
    request = Request(cluster=cluster, model=model, global_batch=64)
    assert len(space.Space(request).groupings[1]) == 3
    assert cost_s(heteroauto, request) >= cost_s(exact, request)


def test_what_would_make_an_impossible_request_possible() -> None:
    """A step that does not fit: fewer sequences at once, ZeRO, or more nodes."""
    chip = load_chip("a-mini")
    chip = replace(chip, memory=replace(chip.memory, capacity_bytes=490_000), tp_limit=1)
    cluster = cluster_of(("a", chip, 2), ("a", chip, 2))
    request = Request(
        cluster=cluster, model=tiny_model(8), global_batch=16, sequences=4, zero_stage=0
    )
    with pytest.raises(SearchError):
        exact.search(request)
    found = list(nearest.remedies(request))
    options = {remedy.option.split()[0] for remedy in found}
    assert {"--micro-batch-per-replica", "--what-if"} <= options
    for remedy in found:
        if remedy.option != nearest.OFFLOADING:
            check_memory(remedy.result.best.plan, remedy.request.cluster)
    (offloading,) = (
        remedy
        for remedy in nearest.remedies(replace(request, uneven_layers=True))
        if remedy.option == nearest.OFFLOADING
    )
    assert offloading.what.endswith("and without --uneven-layers")


def test_degrees_that_nothing_suits_are_helped_too() -> None:
    cluster = cluster_of(("a", load_chip("a-mini"), 3), ("b", load_chip("b-mini"), 2))
    request = Request(cluster=cluster, model=tiny_model(3), global_batch=8)
    with pytest.raises(SearchError):
        exact.search(request)
    assert list(nearest.remedies(request))
