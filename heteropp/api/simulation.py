"""Runs a plan on predicted times, without chips."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from heteropp.api.checking import check_given
from heteropp.api.errors import InputError
from heteropp.api.given import AnyCluster, AnyPlan, measured_as, the_cluster, the_plan
from heteropp.cost.planned import check_cluster
from heteropp.description.used_chips import used_cluster
from heteropp.search.planner import MOST_SEQUENCES

if TYPE_CHECKING:
    from heteropp.simulator.simulate import Simulation


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """The bounds of what a simulation can be asked."""

    profile: Path | str | None
    emulated: bool
    slack: Annotated[int, Field(ge=0, le=MOST_SEQUENCES)] | None
    noise: Annotated[float, Field(ge=0, le=2)]
    seed: int
    slowdown: dict[int, Annotated[float, Field(gt=0, le=1000)]]
    trust_remote_code: bool


def simulate(
    plan: AnyPlan,
    cluster: AnyCluster,
    *,
    profile: Path | None = None,
    emulated: bool = False,
    slack: int | None = None,
    noise: float = 0.0,
    seed: int = 0,
    slowdown: Mapping[int, float] | None = None,
    trust_remote_code: bool = False,
) -> Simulation:
    """Returns one step of a plan as heteropp-simulate shows it: seconds, bubble, memory, spans.

    profile: what heteropp-profile measured on the cluster's chips; absent, their files say how fast
    they are, also where the plan was made from a profile. emulated: messages as emulated chips pace
    them. slack: of a transport that posts no receives ahead, the sends that may wait for their
    receive, 0: nothing is buffered; None: receives are posted ahead. noise: sigma of a
    random factor on each piece of work, drawn from `seed`. slowdown: how many times as long a
    rank's work takes, by rank. trust_remote_code: whether code that came with the plan's model may
    run.

    Raises FileError, InputError, PlanError, ProfileError where the profile measured no such stages,
    or DeadlockError for a plan that would hang.
    """
    from heteropp.simulator.simulate import simulate as run

    check_given(
        SimulationOptions,
        {
            "profile": profile,
            "emulated": emulated,
            "slack": slack,
            "noise": noise,
            "seed": seed,
            "slowdown": slowdown or {},
            "trust_remote_code": trust_remote_code,
        },
    )
    content = the_plan(plan, trust_remote_code)
    if slack is not None and not content.overlap:
        raise InputError(
            "slack is given for a plan whose overlap is false: its sends wait until their messages "
            "have arrived, however many may wait; expected a plan with overlap"
        )
    machines = used_cluster(content, the_cluster(cluster))
    machines = measured_as(machines, profile, content.model)
    check_cluster(content, machines)
    for rank in slowdown or {}:
        if not isinstance(rank, int) or not 0 <= rank < content.world_size:
            raise InputError(
                f"slowdown names rank {rank!r}; the plan has ranks 0 to {content.world_size - 1}"
            )
    return run(
        content,
        machines,
        emulated=emulated,
        slack=slack,
        noise=noise,
        seed=seed,
        slowdown=dict(slowdown or {}),
    )
