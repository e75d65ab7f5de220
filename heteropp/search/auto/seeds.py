"""The first plans to try: pipelines under several orders of chip types, skeletons, other planners'.

The exact programme's tables give the best pipeline of each data-parallel degree under the formula
of section 4.3.2; of what it leaves out, sequence parallelism, micro-batch sizes and orders of types
are tried one by one. Skeletons bring several pipelines, and stages of unlike chips.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from heteropp import _planner
from heteropp.description.cluster import Cluster
from heteropp.description.plan import Plan, Stage
from heteropp.description.profile import ProfileError
from heteropp.search.auto.changed import with_each
from heteropp.search.auto.freedom import Freedom
from heteropp.search.auto.idle import rounded
from heteropp.search.auto.regrouping import for_longer
from heteropp.search.auto.slicing import for_longer_in_slices
from heteropp.search.auto.spreading import WAYS as SPREAD_BY
from heteropp.search.auto.spreading import degrees, roomier, spread
from heteropp.search.auto.trials import on_all
from heteropp.search.balance import Balance
from heteropp.search.costs import Costs
from heteropp.search.parts import WAYS
from heteropp.search.planner import Request, SearchError, planner
from heteropp.search.skeletons import Skeleton, skeletons
from heteropp.search.space import Space
from heteropp.search.tables import Tables

WIDTH = 32  # chains of one length that the programme keeps
MOST_ORDERS = 24  # of chip types
FEW_ORDERS = 6  # of many chips
FREE = 32  # chips, up to which stages of one type may have unlike degrees
OTHERS = ("autohet", "zorse", "uniform")  # planners that answer in a moment, as the exact one does
OF_SHORTER = 6  # plans made of those for sequences so many times as short
FEW_OF_SHORTER = 2  # of them, where experts are spread, too
ROOMIER = (2, 4, 8, 16)  # times the memory, for which plans are made whose experts are then spread
OF_ROOMIER = 6  # plans of each kind made for each of these
MANY = 1024  # chips, beyond which only that does, and in the space that was asked for
Seed = tuple[float, Plan]  # with its estimated seconds


def orders(cluster: Cluster) -> list[tuple[str, ...]]:
    """Returns the orders of chip types to try: all of few types, of many those near the usual."""
    names = cluster.chip_names()
    most = MOST_ORDERS if cluster.world_size <= FREE else FEW_ORDERS
    if math.factorial(min(len(names), 5)) <= most:
        return list(itertools.permutations(names))
    found = [tuple(names), tuple(reversed(names))]
    for i, j in itertools.combinations(range(len(names)), 2):
        swapped = list(names)
        swapped[i], swapped[j] = swapped[j], swapped[i]
        found.append(tuple(swapped))
    return found[:most]


def chains(request: Request, freedom: Freedom, made: dict) -> Iterator[Seed]:
    """Yields the best pipelines on all chips, by the formula.

    made: the costs of stages, which requests that differ in their chips alone share.
    """
    for sequences in freedom.sizes:
        wanted = replace(
            request,
            sequences=sequences,
            schedule=freedom.chain_schedule,
            uneven_layers=True,
            stage_degrees=request.cluster.world_size <= FREE,
            context_parallel=None,
            expert_parallel=None,
        )
        for order in orders(request.cluster):
            # rows cut over the ranks of a replica save memory, and mostly time
            space = Space(wanted, order, sequence_parallel=max(freedom.sequence_parallel))
            with suppress(SearchError, ProfileError):
                yield from _pipelines(space, Costs(space, made))


def _pipelines(space: Space, costs: Costs) -> Iterator[Seed]:
    groups = space.groupings[0]
    for share in space.shares:
        if not space.uses_all(groups, share):
            continue
        tables = Tables(space, costs, share, groups)
        for problem in tables.problems(tables.everything):
            solution = _planner.solve(problem, math.inf, WIDTH)
            if solution.stages:
                yield solution.cost_s, space.plan(share, tables.stages(solution))


def on_skeletons(request: Request, freedom: Freedom) -> Iterator[Seed]:
    """Yields plans of several pipelines, and of stages of unlike chips, by their estimates."""
    like = Plan(
        model=request.model,
        global_batch=request.global_batch,
        micro_batch=1,
        schedule=freedom.chain_schedule,
        zero_stage=request.zero_stage,
        optimizer=request.optimizer,
        pipelines=(),
    )
    balance = Balance(request.cluster, like)
    found = dict.fromkeys(
        skeleton
        for skeleton in skeletons(request.cluster, request.model, balance.power)
        if _within_limits(skeleton, request.cluster)
    )
    sketches = []
    for skeleton in found:
        with suppress(ProfileError):
            sketches += [
                (balance.estimate_s(sketch), sketch) for sketch in balance.sketches(skeleton)
            ]
    for estimate_s, sketch in sorted(sketches):
        with suppress(ProfileError):
            if candidate := balance.candidate(sketch):
                yield estimate_s, candidate.plan


def _within_limits(skeleton: Skeleton, cluster: Cluster) -> bool:
    """Whether no tensor-parallel group is larger than its chip's limit."""
    return all(
        len(ranks) <= cluster.chip(ranks[0]).tp_limit
        for pipeline in skeleton
        for stage in pipeline
        for ranks in stage
    )


def of_planners(request: Request) -> Iterator[Plan]:
    """Yields what other planners answer, the exact one with each of its options."""
    if request.cluster.world_size > MANY:
        yield from _of_many_chips(request)
        return
    for uneven, unlike in itertools.product((False, True), repeat=2):
        yield from _answers("exact", replace(request, uneven_layers=uneven, stage_degrees=unlike))
    for name in OTHERS:
        yield from _answers(name, request)


def _of_many_chips(request: Request) -> Iterator[Plan]:
    """Yields the exact planner's answers on all chips, which degrees seldom divide, and on nearly
    all.
    """
    everyone, fewer = request.cluster, rounded(request.cluster)
    yield from _answers("exact", request)
    if fewer is not everyone:
        yield from on_all(_answers("exact", replace(request, cluster=fewer)), fewer, everyone)


def of_shorter(request: Request, freedom: Freedom, count: int = OF_SHORTER) -> Iterator[list[Plan]]:
    """Yields plans that cut sequences, which cost about what as many shorter ones would.

    They are made of quick planners' plans for those. Replicas that had a short sequence each take a
    part of a long one, for which keys and values go from part to part; or a pipeline that had as
    many short ones takes a long one in slices. Of each the fastest way to cut comes first, and the
    one that needs least memory last. count: of plans of each kind made of those for sequences so
    many times as short.
    """
    for factor in sorted({*freedom.context_parallel, *freedom.token_slices} - {1}):
        length, rest = divmod(request.model.sequence_length, factor)
        if rest:
            return
        shorter = replace(
            request,
            model=replace(request.model, sequence_length=length),
            global_batch=factor * request.global_batch,
        )
        plans = list(dict.fromkeys(_quickly(shorter, Freedom(shorter))))
        makers = (
            (for_longer, freedom.context_parallel),
            (for_longer_in_slices, freedom.token_slices),
        )
        for make, factors in makers:
            longer = (
                list(filter(None, (make(plan, request.model, factor, n) for n in range(WAYS))))
                for plan in (plans if factor in factors else [])
            )
            yield from itertools.islice(filter(None, longer), count)


def of_spread(request: Request, freedom: Freedom) -> Iterator[list[list[Plan]]]:
    """Yields plans whose experts lie over ranks, which need less memory for it.

    They are made of quick planners' plans for chips with more memory, twice as much in each turn.
    Of each the fastest way to spread experts comes first, and stages that recompute last.
    """
    if freedom.expert_parallel == 1:
        return
    for factor in ROOMIER:
        roomy = replace(request, cluster=roomier(request.cluster, factor))
        kinds = _quickly(roomy, Freedom(roomy)), (plan for _, plan in on_skeletons(roomy, freedom))
        yield [
            _spread_ways(plan, freedom)
            for kind in kinds
            for plan in itertools.islice(filter(_has_copies, dict.fromkeys(kind)), OF_ROOMIER)
        ]


def of_shorter_and_spread(request: Request, freedom: Freedom) -> Iterator[list[Plan]]:
    """Yields plans that cut sequences and whose experts lie over ranks, made as those that do one
    of the two: of each the ones that need least memory for parts.
    """
    if freedom.expert_parallel == 1:
        return
    for factor in ROOMIER:
        roomy = replace(request, cluster=roomier(request.cluster, factor))
        for plans in of_shorter(roomy, freedom, FEW_OF_SHORTER):
            yield _spread_ways(plans[-1], freedom)


def _has_copies(plan: Plan) -> bool:
    return any(stage.copies > 1 for pipeline in plan.pipelines for stage in pipeline.stages)


def _spread_ways(plan: Plan, freedom: Freedom) -> list[Plan]:
    found = []
    for recompute, by in itertools.product((False, True), SPREAD_BY):

        def change(stage: Stage) -> Stage:
            own = degrees(stage, freedom.expert_parallel)
            stage = spread(stage, freedom, own[0], by) if own else stage  # noqa: B023
            return replace(stage, recompute=stage.recompute or recompute)  # noqa: B023

        found.append(with_each(plan, change))
    return list(dict.fromkeys(found))


def _quickly(request: Request, freedom: Freedom) -> Iterator[Plan]:
    request = replace(request, context_parallel=None, expert_parallel=None)
    if request.cluster.world_size > MANY:
        yield from _of_many_chips(request)
        return
    yield from _answers("exact", replace(request, uneven_layers=True, stage_degrees=True))
    yield from _answers("uniform", request)
    found = sorted(chains(request, freedom, {}), key=lambda seed: seed[0])
    yield from (plan for _, plan in found)


def _answers(name: str, request: Request) -> Iterator[Plan]:
    with suppress(SearchError, ProfileError):
        result = planner(name)(request)
        for candidate in (result.best, *result.runners_up):
            yield candidate.plan
