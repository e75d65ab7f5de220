"""Runs planners on one request and judges their plans under one simulator."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from heteropp.cost.capacity import fits
from heteropp.cost.planned import check_cluster, rank_memory
from heteropp.description.cluster import Cluster
from heteropp.description.plan import Plan, PlanError, validate
from heteropp.description.prediction import Prediction
from heteropp.description.profile import ProfileError, cited_profile
from heteropp.description.used_chips import used_cluster
from heteropp.search.planner import (
    Candidate,
    DoesNotFitError,
    Request,
    Result,
    SearchError,
    does_not_fit,
    planner,
)
from heteropp.search.slack import with_slack
from heteropp.simulator.simulate import Simulation, simulate
from hyperhetero.garbage import collecting

AHEAD = (0, 1, 2)  # forwards that stages of 1F1B run ahead beyond its own, one way and the other


@dataclass(frozen=True)
class Judged:
    """A plan as simulated; it carries its prediction."""

    plan: Plan
    cost_s: float  # its planner's own
    simulation: Simulation


@dataclass(frozen=True)
class Verdict:
    """What one planner came to: its plans, its own choice first, or why it has none."""

    planner: str
    result: Result | None
    judged: list[Judged]
    search_s: float
    error: SearchError | None = None

    @property
    def best(self) -> Judged:
        return self.judged[0]


def ask(name: str, request: Request, simulated: int = 4) -> Verdict:
    """Returns one planner's answer, with at most `simulated` of its plans simulated.

    A SearchError of the planner is kept in the verdict, not raised.
    """
    with collecting(False):
        return _ask(name, request, simulated)


def _ask(name: str, request: Request, simulated: int) -> Verdict:
    began_s = time.perf_counter()
    try:
        result = _that_fits(planner(name)(request), request.cluster)
    except SearchError as error:
        return Verdict(name, None, [], time.perf_counter() - began_s, error)
    search_s = time.perf_counter() - began_s
    candidates = [result.best, *result.runners_up][:simulated]
    judged = [judge(candidate, result, request.cluster) for candidate in candidates]
    if name == "exact" and request.schedule == "1f1b":
        judged[0] = relaxed(judged[0], result, request.cluster)
    return Verdict(name, result, judged, search_s)


def _that_fits(result: Result, cluster: Cluster) -> Result:
    """Returns the result with only the plans that can run and that fit by the memory walk.

    Planners only estimate memory, and know nothing of what Muon cannot do. Raises SearchError where
    no plan is left.
    """
    valid: list[Candidate] = []
    problems: list[PlanError] = []
    for candidate in (result.best, *result.runners_up):
        try:
            validate(candidate.plan)
            valid.append(candidate)
        except PlanError as error:
            problems.append(error)
    if not valid:
        raise SearchError(f"{result.planner}'s plan cannot run: {problems[0]}")
    candidates = [c for c in valid if fits(c.plan, used_cluster(c.plan, cluster))]
    if not candidates:
        raise does_not_fit(valid[0].plan, cluster)
    return replace(result, best=candidates[0], runners_up=candidates[1:])


def ask_all(names: Iterable[str], request: Request) -> list[Verdict]:
    """Returns every planner's answer, fastest simulated step first, those without a plan last."""
    verdicts = [_answer(name, request) for name in names]
    return sorted(
        verdicts,
        key=lambda v: (not v.judged, v.best.simulation.step_s if v.judged else 0.0, v.planner),
    )


def _answer(name: str, request: Request) -> Verdict:
    """Returns one planner's answer, which is an error where it asks for what was not measured."""
    try:
        return ask(name, request, simulated=1)
    except ProfileError as error:
        return Verdict(name, None, [], 0.0, SearchError(str(error)))


def judge(candidate: Candidate, result: Result, cluster: Cluster) -> Judged:
    """Validates and simulates a plan on the chips that it uses."""
    validate(candidate.plan)
    cluster = used_cluster(candidate.plan, cluster)
    check_cluster(candidate.plan, cluster)
    simulation = simulate(candidate.plan, cluster)
    prediction = _prediction(candidate, result.planner, result.lower_bound_s, simulation)
    profile = cited_profile(cluster)
    plan = replace(candidate.plan, profile=profile, prediction=prediction)
    return Judged(plan, candidate.cost_s, simulation)


def relaxed(judged: Judged, result: Result, cluster: Cluster) -> Judged:
    """Returns the 1F1B plan with the slack that fits, where its simulated step is faster."""
    plans = dict.fromkeys(with_slack(judged.plan, cluster, ahead) for ahead in AHEAD)
    others = [
        judge(Candidate(plan, judged.cost_s), result, cluster)
        for plan in plans
        if fits(plan, cluster)
    ]
    return min(judged, *others, key=lambda each: each.simulation.step_s)


def judge_nearest(name: str, error: DoesNotFitError, cluster: Cluster) -> Judged:
    """Returns the plan that overruns memory least, with its prediction."""
    simulation = simulate(error.plan, used_cluster(error.plan, cluster))
    candidate = Candidate(error.plan, simulation.step_s)
    prediction = _prediction(candidate, name, 0.0, simulation)
    return Judged(replace(error.plan, prediction=prediction), candidate.cost_s, simulation)


def _prediction(
    candidate: Candidate, name: str, lower_bound_s: float, simulation: Simulation
) -> Prediction:
    plan, cluster = candidate.plan, simulation.cluster
    return Prediction(
        planner=name,
        step_s=simulation.step_s,
        cost_s=candidate.cost_s,
        lower_bound_s=lower_bound_s,
        tokens_per_chip_per_s=simulation.tokens_per_chip_per_s,
        memory_bytes=tuple(memory.total for memory in rank_memory(plan, cluster)),
        capacity_bytes=tuple(
            cluster.chip(rank).memory.capacity_bytes for rank in range(plan.world_size)
        ),
    )
