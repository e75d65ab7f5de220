"""Which of a cluster's chips a plan uses: mostly all; the others stay idle."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from heteropp.description.cluster import Cluster
from heteropp.description.plan import Plan, PlanError


def used_cluster(plan: Plan, cluster: Cluster) -> Cluster:
    """Returns the cluster of the chips that a plan uses, numbered as its ranks are.

    Raises PlanError where the cluster does not have them.
    """
    if plan.members is None or plan.members == cluster.members:
        return cluster
    try:
        kept = cluster.kept(map(cluster.rank, plan.members))
    except ValueError as error:
        raise PlanError(f"members: {error}") from None
    if kept.members != plan.members:
        raise PlanError(
            f"members are not in the order of cluster {cluster.name}, or one comes twice"
        )
    return kept


def idle_members(plan: Plan, cluster: Cluster) -> list[str]:
    """Returns the names of the chips that a plan leaves idle."""
    used = set(cluster.members if plan.members is None else plan.members)
    return [member for member in cluster.members if member not in used]


def chips_in_words(plan: Plan) -> str:
    """Returns how many chips of each type a plan uses, such as "4 a-mini and 2 b-mini"."""
    count: Counter[str] = Counter()
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for chip in stage.chips:
                count[Path(chip).name.removesuffix(".toml")] += stage.tp
    return " and ".join(f"{number} {chip}" for chip, number in sorted(count.items()))
