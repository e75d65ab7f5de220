"""The search: seeds on all chips and on fewer, then local search from the best that are unlike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

from heteropp.description.cluster import Cluster
from heteropp.description.plan import Plan
from heteropp.search.auto.bound import step_bound_s
from heteropp.search.auto.climb import climb
from heteropp.search.auto.freedom import Freedom
from heteropp.search.auto.idle import smaller, why_idle
from heteropp.search.auto.seeds import chains, of_planners, on_skeletons
from heteropp.search.auto.trials import Budget, Draft, Trial, Trials, renumbered
from heteropp.search.planner import Candidate, Request, Result, SearchError, planner

PASSES = 600_000  # of micro-batches through replicas, in all simulations together
SEEDS = 24  # of each kind, simulated on all chips
FEWER_SEEDS = 6  # and on fewer of them
CLUSTERS = 12  # of fewer chips
CLIMBS = 4  # local searches
NEAR = 1.2  # times the best so far: a seed that slack may make the best
RUNNERS_UP = 3


def search(request: Request) -> Result:
    """The best plan found. Raises SearchError, or DoesNotFitError where none was found to fit."""
    freedom = Freedom(request)
    trials = Trials(request, freedom, Budget(PASSES, request.budget_s))
    bound_s = step_bound_s(request, freedom, request.cluster)
    _seed(trials)
    found = trials.ranked()
    if not found:
        raise _no_plan(request)
    for trial in _unlike(found, CLIMBS):
        climb(trial, trials)
    ranked = trials.ranked()
    best, *others = _unlike(ranked, 1 + RUNNERS_UP)
    all_used_s = next((t.step_s for t in ranked if t.plan.members is None), None)
    return Result(
        planner="auto",
        best=Candidate(best.plan, best.step_s),
        runners_up=[Candidate(other.plan, other.step_s) for other in others],
        lower_bound_s=min(bound_s, best.step_s),
        steps=trials.simulated,
        notes=list(why_idle(best.plan, request.cluster, all_used_s)),
    )


def _seed(trials: Trials) -> None:
    """Tries seeds on all chips, then on fewer where they might be faster."""
    request, freedom = trials.request, trials.freedom
    made: dict = {}
    _try_seeds(trials, request.cluster, made, SEEDS)
    for plan in of_planners(request):
        _try(plan, trials)
    fewer = smaller(request.cluster, lambda kept: step_bound_s(request, freedom, kept))
    for bound_s, kept in fewer[:CLUSTERS]:
        if bound_s < trials.best_s:
            _try_seeds(trials, kept, made, FEWER_SEEDS)


def _try_seeds(trials: Trials, cluster: Cluster, made: dict, count: int) -> None:
    """Tries the seeds that look best on a cluster, whose ranks are some of the request's."""
    request, freedom = replace(trials.request, cluster=cluster), trials.freedom
    number = {rank: request_rank for rank, request_rank in enumerate(_ranks(cluster, trials))}
    likely = sorted(chains(request, freedom, made), key=lambda seed: seed[0])
    for _, plan in (*likely[:count], *islice(on_skeletons(request, freedom), count)):
        _try(renumbered(plan, number), trials)


def _ranks(cluster: Cluster, trials: Trials) -> list[int]:
    return [trials.cluster.rank(member) for member in cluster.members]


def _try(plan: Plan, trials: Trials) -> None:
    found = trials.try_(Draft(plan))
    if found and plan.schedule == "1f1b" and found.step_s < NEAR * trials.best_s:
        trials.try_(Draft(plan, 1))


def _unlike(trials: Iterable[Trial], count: int) -> list[Trial]:
    """Returns the first few trials whose stages stand on unlike ranks."""
    found: dict[object, Trial] = {}
    for trial in trials:
        key = tuple(
            tuple(tuple(r.ranks for r in stage.replicas) for stage in pipeline.stages)
            for pipeline in trial.draft.plan.pipelines
        )
        found.setdefault(key, trial)
        if len(found) == count:
            break
    return list(found.values())


def _no_plan(request: Request) -> SearchError:
    """Returns the exact planner's error, which knows the nearest plan."""
    try:
        planner("exact")(replace(request, uneven_layers=True, stage_degrees=True))
    except SearchError as error:
        return error
    return SearchError("no plan that fits was found")
