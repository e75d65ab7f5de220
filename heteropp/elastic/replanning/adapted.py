"""What is left of a plan's skeleton when chips have gone or come.

As in Hetu v2 (appendix A.3), a tensor-parallel group that lost a rank goes on as smaller ones: of
three ranks, as a stage of two and one of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from heteropp.description.cluster import Cluster
from heteropp.description.plan import Plan
from heteropp.search.skeletons import Skeleton, Stage, alike, pieces, powers_down


def adapted(plan: Plan, rank_of: Sequence[int | None], cluster: Cluster) -> Skeleton:
    """Returns a plan's skeleton without the chips that have gone, on the numbers of today.

    Chips that have come are the stages of one more pipeline. rank_of: by rank of the plan, the
    rank that its chip is now, or None for a chip that has gone.
    """
    pipelines = []
    for pipeline in plan.pipelines:
        stages: list[Stage] = []
        for stage in pipeline.stages:
            left = [
                sorted(r for rank in group if (r := rank_of[rank]) is not None)
                for group in stage.groups
            ]
            if len(left) > 1 and any(len(ranks) % stage.tp for ranks in left):
                # its groups stay together, each of the largest degree that all have
                whole = math.gcd(*map(len, left)) or 1
                tp = next(tp for tp in powers_down(stage.tp) if whole % tp == 0)
            else:
                tp = stage.tp
            units = [unit for ranks in left for unit in pieces(ranks, tp)]
            stages += alike(units)
        if stages:
            pipelines.append(tuple(stages))
    known = {rank for rank in rank_of if rank is not None}
    joined = [[rank for rank in node.ranks if rank not in known] for node in cluster.nodes]
    tp = max(stage.tp for pipeline in plan.pipelines for stage in pipeline.stages)
    fresh = [(unit,) for ranks in joined for unit in pieces(ranks, tp)]
    return tuple(pipelines) + ((tuple(fresh),) if fresh else ())
