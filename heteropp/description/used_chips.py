"""Which of a cluster's chips a plan uses: mostly all; the others stay idle."""

from __future__ import annotations

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
