"""Runs a plan on predicted times, without chips."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from heteropp.api.given import AnyCluster, AnyPlan, the_cluster, the_plan
from heteropp.cost.planned import check_cluster

if TYPE_CHECKING:
    from heteropp.simulator.simulate import Simulation


def simulate(
    plan: AnyPlan,
    cluster: AnyCluster,
    *,
    emulated: bool = False,
    slack: int | None = None,
    noise: float = 0.0,
    seed: int = 0,
    slowdown: Mapping[int, float] | None = None,
) -> Simulation:
    """Returns one step of a plan as heteropp-simulate shows it: seconds, bubble, memory, spans.

    emulated: messages as emulated chips pace them. slack: sends that may wait for their receive, 0:
    nothing is buffered. noise: sigma of a random factor on each piece of work, drawn from `seed`.
    slowdown: how many times as long a rank's work takes, by rank.

    Raises FileError, PlanError, or DeadlockError for a plan that would hang.
    """
    from heteropp.simulator.simulate import simulate as run

    content, machines = the_plan(plan), the_cluster(cluster)
    check_cluster(content, machines)
    return run(
        content,
        machines,
        emulated=emulated,
        slack=slack,
        noise=noise,
        seed=seed,
        slowdown=dict(slowdown or {}),
    )
