"""Metis's problem for a request: profiles of our own making, and its plans as ours.

A layer's time and memory are those of our cost model; the first layer embeds, the last one has the
head. Where the chips were measured they are the profile's, whose degrees and batches are then all
that is searched; one chip with one sequence has to be among them, as Metis weighs layers by those.
A chip's own memory must hold its share, with the micro-batches in flight; the profiles that Metis
reads do not tell those.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from heteropp.cost.communication import NO_LINK
from heteropp.cost.planned import link_inside
from heteropp.cost.stage_time import Memory, StageShape, stage_memory, stage_time
from heteropp.description.cluster import Cluster, Node
from heteropp.description.plan import Pipeline, Plan, Replica, Stage
from heteropp.description.profile import ChipProfile, chip_profile
from heteropp.models.spec import ModelSpec
from heteropp.search.metis_cost import Line, MetisPlan
from heteropp.search.metis_files import LayerProfile, MetisNode, Profiles
from heteropp.search.metis_problem import Problem
from heteropp.search.planner import Request

PERMUTED = 4  # groups whose orders are all tried: the public tool's example
Figure = Callable[[int, bool, bool], float]  # of a stage: its layers; is it first, is it last


def problem_of(request: Request) -> Problem:
    cluster, model = request.cluster, request.model
    names = sorted(cluster.chip_names())
    most_tp = max(cluster.chip(cluster.ranks_of(name)[0]).tp_limit for name in names)
    degrees = tuple(model.tp_degrees(most_tp))
    batches = [1 << bit for bit in range(request.global_batch.bit_length())]
    by_type = {}
    update_s = {}
    for name in names:
        node = cluster.node(cluster.ranks_of(name)[0])
        limit = min(node.chip.tp_limit, len(node.ranks))
        measured = chip_profile(cluster, name)
        by_type[name] = {
            (tp, batch): _profile(request, node, measured, tp, batch)
            for tp in degrees
            if tp <= limit
            for batch in batches
            if measured is None or measured.knows(tp, batch)
        }
        update_s[name] = sum(_layers(model, partial(_update_s, request, node, measured)))
    parameters = _layers(
        model, lambda *piece: float(_memory(request, None, 1, 1, 1, *piece).parameters)
    )
    return Problem(
        nodes=tuple(_nodes(cluster)),
        profiles=Profiles(
            layers=model.layers,
            parameter_bytes=parameters,
            update_s=update_s,
            batch_s=0.0,
            by_type=by_type,
        ),
        global_batch=request.global_batch,
        activation_bytes=float(model.sequence_length * model.hidden * model.dtype_bytes),
        degrees=degrees,
        largest_batch=batches[-1] * 2 - 1,
        memory_coefficient=1.0,
        pooled=False,
        permute_length=PERMUTED,
    )


def plan_of(request: Request, problem: Problem, found: MetisPlan) -> Plan:
    """Returns the plan that Metis found, on the request's ranks, type by type in its order."""
    arrangement, line = found.arrangement, Line(problem, found.arrangement.order)
    ranks = [r for chip in arrangement.order for r in request.cluster.ranks_of(chip)]
    stages, first = [], 0
    pairs = zip(
        arrangement.groups, found.degrees, itertools.pairwise(found.boundaries), strict=True
    )
    for size, (_, tp), layers in pairs:
        group = line.group(first, size, tp, arrangement.micro_batches)
        assert group is not None
        replicas = tuple(
            Replica(ranks=tuple(ranks[at : at + tp]), chip=chip, batch_share=share)
            for at, chip, share in zip(
                range(first, first + size, tp), group.types, group.shares, strict=True
            )
        )
        stages.append(Stage(layers=layers, recompute=False, replicas=replicas))
        first += size
    return Plan(
        model=request.model,
        global_batch=request.global_batch,
        micro_batch=request.global_batch // arrangement.micro_batches,
        schedule=request.schedule,
        zero_stage=request.zero_stage,
        optimizer=request.optimizer,
        pipelines=(Pipeline(micro_batches=arrangement.micro_batches, stages=tuple(stages)),),
    )


def _layers(model: ModelSpec, of: Figure) -> tuple[float, ...]:
    """Returns a figure for each layer.

    of: gives the figure of a stage of so many layers, which is the first, the last, or not.
    """
    if model.layers == 1:
        return (of(1, True, True),)
    # a layer alone, without what a stage has whatever its layers
    alone = of(1, False, False)
    inner = of(2, False, False) - alone
    fixed = alone - inner
    first, last = of(1, True, False) - fixed, of(1, False, True) - fixed
    return (first, *(inner,) * (model.layers - 2), last)


def _profile(
    request: Request, node: Node, measured: ChipProfile | None, tp: int, batch: int
) -> LayerProfile:
    model = request.model
    inside = link_inside(request.cluster, node, tp) if tp > 1 else NO_LINK

    def seconds(layers: int, first: bool, last: bool) -> float:
        shape = _shape(tp, 1, batch, layers, first, last)
        return stage_time(model, shape, node.chip, inside, NO_LINK, measured).micro_batch_s

    def memory(dp: int) -> Figure:
        def of(layers: int, first: bool, last: bool) -> float:
            return float(_memory(request, measured, tp, dp, batch, layers, first, last).total)

        return of

    def in_flight(micro_batches: int) -> Figure:
        def of(layers: int, first: bool, last: bool) -> float:
            kind = tp, 2, batch, layers, first, last
            return float(_memory(request, measured, *kind, micro_batches).kept)

        return of

    # bytes are a + b / dp with two replicas and more; one alone needs no more than that
    one, half = memory(2), memory(4)
    kept = _difference(model, in_flight(2), in_flight(1))
    divided = [4 * size for size in _difference(model, one, half)]
    held = [
        total - part / 2 - more
        for total, part, more in zip(_layers(model, one), divided, kept, strict=True)
    ]
    alone = one(1, False, False)
    return LayerProfile(
        seconds=_layers(model, seconds),
        between_s=0.0,
        memory_bytes=tuple(held),
        divided_bytes=tuple(divided),
        kept_bytes=tuple(kept),
        stage_bytes=2 * alone - one(2, False, False) if model.layers > 1 else 0.0,
    )


def _difference(model: ModelSpec, one: Figure, other: Figure) -> tuple[float, ...]:
    return tuple(a - b for a, b in zip(_layers(model, one), _layers(model, other), strict=True))


def _shape(tp: int, dp: int, batch: int, layers: int, first: bool, last: bool) -> StageShape:
    return StageShape(
        layers=layers,
        first=first,
        last=last,
        tp=tp,
        dp=dp,
        sequences=batch,
        zero_stage=0,
        recompute=False,
    )


def _memory(
    request: Request,
    measured: ChipProfile | None,
    tp: int,
    dp: int,
    batch: int,
    layers: int,
    first: bool,
    last: bool,
    in_flight: int = 1,
) -> Memory:
    shape = replace(
        _shape(tp, dp, batch, layers, first, last),
        zero_stage=request.zero_stage,
        optimizer=request.optimizer,
    )
    return stage_memory(request.model, shape, in_flight, request.global_batch // batch, measured)


def _update_s(
    request: Request,
    node: Node,
    measured: ChipProfile | None,
    layers: int,
    first: bool,
    last: bool,
) -> float:
    shape = replace(_shape(1, 1, 1, layers, first, last), optimizer=request.optimizer)
    time = stage_time(request.model, shape, node.chip, NO_LINK, NO_LINK, measured)
    return time.norm_s + time.update_s


def _nodes(cluster: Cluster) -> Iterator[MetisNode]:
    # two nodes of each kind stand for all
    firsts = {(n.chip_name, n.place): n for n in reversed(cluster.nodes)}
    lasts = {(n.chip_name, n.place): n for n in cluster.nodes}
    for node in cluster.nodes:
        others = [n for n in (*firsts.values(), *lasts.values()) if n is not node]
        links = [cluster.link(node.ranks.start, other.ranks.start) for other in others]
        chips, intra_bytes_per_s = len(node.ranks), node.chip.links.intra_node_bytes_per_s
        groups = (link_inside(cluster, node, ranks) for ranks in range(2, chips + 1))
        yield MetisNode(
            chip=node.chip_name,
            chips=chips,
            capacity_bytes=node.chip.memory.capacity_bytes,
            intra_bytes_per_s=intra_bytes_per_s,
            inter_bytes_per_s=min((link.bytes_per_s for link in links), default=float("inf")),
            # with one rank there is no one to wait for
            collective_bytes_per_s=(intra_bytes_per_s,) * 2 + tuple(g.bytes_per_s for g in groups),
        )
