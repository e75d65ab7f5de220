"""Who sums gradients with whom, and for how long: the reductions of a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

from heteropp.cost.communication import all_gather_s
from heteropp.cost.planned import slowest_link
from heteropp.description.cluster import Cluster
from heteropp.description.plan import Plan, Stage
from heteropp.description.sections import sections
from heteropp.models.spec import ModelSpec
from heteropp.optimizer.replicated_gradients import Part, shared
from heteropp.simulator.reductions import ReductionGroup

Seats = Mapping[tuple[int, int], list[int]]  # by pipeline and stage: its replicas


def reductions(
    plan: Plan,
    cluster: Cluster,
    seats: Seats,
    reduce_s: Sequence[Sequence[float]],
    reduces_at: Mapping[tuple[int, int], Mapping[int, int]],
) -> tuple[list[ReductionGroup], list[list[list[int]]]]:
    """Returns the groups, and by seat and ministage those that it takes part in, in order.

    The replicas of a stage are a group, and so are all that hold a common slice of parameters; last
    layers come first. reduce_s: the sum over the replicas, by seat and ministage. reduces_at: the
    places of REDUCE in the tables, by pipeline and stage, then ministage.
    """
    groups: list[ReductionGroup] = []
    taken: list[list[list[int]]] = [[[] for _ in seconds] for seconds in reduce_s]
    for members in seats.values():
        for k, _ in enumerate(reduce_s[members[0]]):
            for a in members:
                taken[a][k].append(len(groups))
            groups.append(ReductionGroup(tuple(members), max(reduce_s[a][k] for a in members)))
    for parts, size_bytes in _shared_bytes(plan).items():
        last: dict[int, int] = {}  # by seat, the ministage with which its part of it is whole
        for p, s, k in sorted(parts, key=lambda part: reduces_at[part[:2]][part[2]]):
            last.update(dict.fromkeys(seats[p, s], k))
        for a, k in last.items():
            taken[a][k].append(len(groups))
        groups.append(ReductionGroup(tuple(last), _sum_s(plan, cluster, parts, size_bytes)))
    return groups, taken


def _shared_bytes(plan: Plan) -> dict[tuple[Part, ...], tuple[int, int]]:
    """Returns the gradient bytes of parameters that several places hold, by those places: of all
    but experts, and of experts.

    The last layers come first, as their gradients are ready first.
    """
    common, of_experts = _gradient_bytes(plan.model)
    last_first = reversed(list(shared(plan).items()))
    return {
        parts: (
            sum(common.get(name, 0) for name in names),
            sum(of_experts.get(name, 0) for name in names),
        )
        for parts, names in last_first
    }


@lru_cache(maxsize=64)
def _gradient_bytes(model: ModelSpec) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the bytes of each parameter's gradient, by name: of all but experts, and of these."""
    width = max(4, model.dtype_bytes)
    sizes: tuple[dict[str, int], dict[str, int]] = {}, {}
    for p in model.all_parameters:
        sizes[model.is_of_experts(p)][p.name] = width * math.prod(p.shape)
    return sizes


def _kept_bytes(plan: Plan, stage: Stage, common: int, of_experts: int) -> float:
    """Returns the most that a rank of a stage keeps of so many bytes of gradients."""
    everyone, *others = sections(stage)
    whole = (common + (0 if others else of_experts)) / everyone.shards(plan.zero_stage)
    if others:
        most = max(stage.expert_shares or ()) / plan.model.expert_count
        whole += of_experts * most / others[0].shards(plan.zero_stage)
    return whole / stage.tp


def _sum_s(
    plan: Plan, cluster: Cluster, parts: Sequence[Part], size_bytes: tuple[int, int]
) -> float:
    """Returns the seconds of a sum over several places.

    Every rank sends what it keeps to the other places, and the largest share takes longest.
    size_bytes: of experts, and of all else before them.
    """
    stages = [plan.pipelines[p].stages[s] for p, s, _ in parts]
    share_bytes = max(_kept_bytes(plan, stage, *size_bytes) for stage in stages)
    ranks = tuple(stage.replicas[0].ranks[0] for stage in stages)
    links = [slowest_link(cluster, rank, ranks) for rank in ranks]
    slowest = min(links, key=lambda link: link.bytes_per_s)
    return all_gather_s(share_bytes * len(parts), len(parts), slowest)
