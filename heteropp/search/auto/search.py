"""The search: seeds on all chips and on fewer, then local search from the best that are unlike."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from operator import itemgetter

from heteropp.cost.capacity import lacking_bytes
from heteropp.description.cluster import Cluster
from heteropp.description.plan import Plan
from heteropp.description.profile import ProfileError
from heteropp.description.used_chips import used_cluster
from heteropp.search.auto.bound import BoundBeside, step_bound_s
from heteropp.search.auto.expert_moves import spread_everywhere
from heteropp.search.auto.freedom import Freedom, as_schedule
from heteropp.search.auto.idle import smaller, why_idle
from heteropp.search.auto.moves import and_balanced
from heteropp.search.auto.restarts import climb_all
from heteropp.search.auto.schedule_moves import schedules
from heteropp.search.auto.seeds import (
    MANY,
    chains,
    of_planners,
    of_shorter,
    of_shorter_and_spread,
    of_spread,
    on_skeletons,
)
from heteropp.search.auto.trials import (
    WORTH_MORE,
    Budget,
    Draft,
    Trial,
    Trials,
    on_all,
    ranks_of,
)
from heteropp.search.judge import AHEAD
from heteropp.search.planner import (
    Candidate,
    DoesNotFitError,
    Request,
    Result,
    SearchError,
    planner,
)

PASSES = 2_400_000  # of micro-batches through replicas, played in all simulations together
PASSES_OF_MANY = 600_000  # where chips are so many that each simulation takes long
MOST_TIMES = 4  # as many passes, where plans still get faster when they are spent
FEW_CHIPS = 64  # up to which a search may take more passes, and be a brief one beside another
SEEDS = 24  # of each kind, simulated on all chips
PROBED_CHIPS = 1024  # of clusters of fewer chips, all together
PROBES = 2  # seeds of each kind on each of them
CLUSTERS = 4  # of these that look best
FEWER_SEEDS = 12  # on each of them
SHARE = 1 / 16  # of the passes that are left, but beside these, for a brief search on each
RETURNED = 4  # plans that each of these searches brings
VARIED = 12  # seeds of unlike stages, and on unlike chips, each tried under every schedule
SEEDS_CLIMBED = 8  # those of unlike stages, and those on unlike chips
LEAST_MINISTAGES = 2  # where a named schedule interleaves them
NEAR = 1.2  # times the best so far: a seed that slack may make the best
FAR = 1.5  # times the best so far: a seed of which memory is not asked
FEWER_CLUSTERS = 8  # on which the nearest plan is sought where no degrees use all chips
RUNNERS_UP = 3
Seeds = tuple[list[Plan], list[Plan]]  # pipelines, and plans on skeletons


def search(request: Request) -> Result:
    """The best plan found. Raises SearchError, or DoesNotFitError where none was found to fit."""
    with BoundBeside(request) as bound:
        return _search(request, bound)


def _search(request: Request, bound: BoundBeside) -> Result:
    chips = request.cluster.world_size
    passes = PASSES if chips <= FEW_CHIPS else PASSES_OF_MANY
    most = passes * (MOST_TIMES if chips <= MANY else 1)
    trials = Trials(request, Freedom(request), Budget(passes, request.budget_s, most))
    found_on_fewer: list[Draft] = []
    if not _found(trials, partial(_seed, bound, found_on_fewer)):
        trials.freedom = replace(trials.freedom, spreads=True)
    if not _found(trials, _seed_experts):
        trials.freedom = replace(trials.freedom, cuts_short=True)
    if not _found(trials, _seed_parts) and not _found(trials, _seed_both):
        raise _no_plan(request)
    freedom = trials.freedom
    bound_s = bound.seconds(freedom)
    _improve(trials)
    best_s = trials.best_s
    tried = [trials.try_(draft, anyway=True) for draft in found_on_fewer]
    if trials.best_s < best_s * (1 - WORTH_MORE):
        climb_all(trials, [trial for trial in tried if trial])
    ranked = trials.ranked()
    best, *others = _unlike(ranked, 1 + RUNNERS_UP, _stages)
    all_used_s = next((t.step_s for t in ranked if t.plan.members is None), None)
    return Result(
        planner="auto",
        best=Candidate(best.plan, best.step_s),
        runners_up=[Candidate(other.plan, other.step_s) for other in others],
        lower_bound_s=min(bound_s, best.step_s),
        steps=trials.simulated,
        notes=list(why_idle(best.plan, request.cluster, all_used_s)),
    )


def _improve(trials: Trials) -> None:
    """Tries the best seeds in other ways, and climbs from what is then best."""
    freedom = trials.freedom
    found = trials.ranked()
    varied = [*_unlike(found, VARIED, _stages), *_unlike(found, VARIED, _chips)]
    for trial in dict.fromkeys(varied):
        if trials.done:
            break
        first = trial.draft.plan
        spread = islice(spread_everywhere(first, freedom), 1)  # by speed; each way takes new traces
        for other in and_balanced(chain(schedules(first, freedom), spread), freedom):
            _try(other, trials)
    found = trials.ranked()
    starts = [*_unlike(found, SEEDS_CLIMBED, _stages), *_unlike(found, SEEDS_CLIMBED, _chips)]
    climb_all(trials, starts)


def _found(trials: Trials, seed: Callable[[Trials, Request], None]) -> bool:
    """Tries seeds, with the ZeRO stage that saves most memory where no plan was found to fit."""
    request, most = trials.request, max(trials.freedom.zero_stages)
    for zero_stage in dict.fromkeys((request.zero_stage, most)):
        seed(trials, replace(request, zero_stage=zero_stage))
        if trials.ranked():
            return True
    return False


def _seed(
    bound: BoundBeside, found_on_fewer: list[Draft], trials: Trials, request: Request
) -> None:
    """Tries seeds on all chips, then on fewer where they might be faster.

    found_on_fewer: takes the best drafts of brief searches on fewer chips.
    """
    freedom = trials.freedom
    many = request.cluster.world_size > MANY
    for plan in of_planners(request):
        if many:
            bound.begin(freedom)  # only now, as what the planner has traced is not traced again
        _try(plan, trials, AHEAD)  # no other planner's plan shall be faster, with its slack
    if trials.done:
        return
    if many:
        bound.seconds(freedom)  # the bounds of fewer chips need the same traces
    made: dict = {}
    _try_seeds(_seeds(trials, request, made), request, trials, SEEDS)
    probed: list[tuple[float, Request, Seeds]] = []
    chips = 0
    for kept in smaller(request.cluster, lambda kept: step_bound_s(request, freedom, kept)):
        chips += kept.world_size
        if chips > PROBED_CHIPS or trials.budget.spent:
            break
        if step_bound_s(request, freedom, kept) < trials.best_s:
            part = replace(request, cluster=kept)
            seeds = _seeds(trials, part, made)
            probed.append((_try_seeds(seeds, part, trials, PROBES), part, seeds))
    for _, part, seeds in sorted(probed, key=itemgetter(0))[:CLUSTERS]:
        _try_seeds(seeds, part, trials, FEWER_SEEDS)
        fits = trials.best_s < math.inf
        if fits and part.cluster.world_size <= FEW_CHIPS and not trials.budget.spent:
            found_on_fewer += _search_briefly(part, seeds, trials)


def _search_briefly(request: Request, seeds: Seeds, trials: Trials) -> Iterator[Draft]:
    """Searches briefly on the chips of a request, which are some of all; yields the best drafts.

    The search on all chips hardly climbs from plans on a few, which look slow beside the others
    until they are improved.
    """
    freedom = replace(trials.freedom, request=request)
    own = Trials(request, freedom, trials.budget.part(SHARE))
    for plan in of_planners(request):
        _try(plan, own, AHEAD)
        if own.done:
            break
    _try_seeds(seeds, request, own, FEWER_SEEDS)
    _improve(own)
    trials.simulated += own.simulated
    best = _unlike(own.ranked(), RETURNED, _stages)
    plans = on_all((trial.draft.plan for trial in best), request.cluster, trials.cluster)
    for trial, plan in zip(best, plans, strict=True):
        yield replace(trial.draft, plan=plan)


def _seed_parts(trials: Trials, request: Request) -> None:
    """Tries seeds that cut sequences, where that is left open."""
    if trials.done:
        return
    for plans in of_shorter(request, trials.freedom):
        next((plan for plan in plans if _try(plan, trials) < math.inf), None)
        if trials.done:
            return


def _seed_both(trials: Trials, request: Request) -> None:
    """Tries seeds that cut sequences and spread experts, until some plan fits."""
    for plans in of_shorter_and_spread(request, trials.freedom):
        if any(_try(plan, trials) < math.inf for plan in plans):
            return


def _seed_experts(trials: Trials, request: Request) -> None:
    """Tries seeds whose experts lie over ranks, in turns that need more memory, until some fit."""
    if trials.done:
        return
    for turn in of_spread(request, trials.freedom):
        for plans in turn:
            next((plan for plan in plans if _try(plan, trials) < math.inf), None)
            if trials.done:
                return
        if trials.ranked():
            return


def _seeds(trials: Trials, request: Request, made: dict) -> Seeds:
    """Returns what to try on the chips of a request, which are some of all, the best first."""
    freedom = trials.freedom
    likely = sorted(chains(request, freedom, made), key=lambda seed: seed[0])[:SEEDS]
    others = islice(on_skeletons(request, freedom), SEEDS)
    return [plan for _, plan in likely], [plan for _, plan in others]


def _try_seeds(seeds: Seeds, request: Request, trials: Trials, count: int) -> float:
    """Tries so many of each kind, on the chips of a request; returns the least step."""
    plans = (plan for kind in seeds for plan in kind[:count])
    tried = [_try(plan, trials) for plan in on_all(plans, request.cluster, trials.cluster)]
    return min(tried, default=math.inf)


def _try(plan: Plan, trials: Trials, ahead: Sequence[int] = (1,)) -> float:
    """Tries a plan, and with slack where that might make it the best; returns the least step.

    ahead: the forwards that stages then run ahead, beyond their own slack.
    """
    freedom = trials.freedom
    if plan.schedule not in freedom.schedules:  # it was found under another
        other = as_schedule(plan, freedom.schedules[0], LEAST_MINISTAGES)
        if other is None:
            return math.inf
        plan = other
    found = trials.try_(Draft(plan), FAR * trials.best_s)
    if found is None:
        return math.inf
    if plan.schedule == "1f1b" and found.step_s < NEAR * trials.best_s:
        slack = filter(None, (trials.try_(Draft(plan, more)) for more in ahead))
        return min(trial.step_s for trial in (found, *slack))
    return found.step_s


def _unlike(trials: Iterable[Trial], count: int, of: Callable[[Plan], Hashable]) -> list[Trial]:
    """Returns the first few trials whose plans differ in something."""
    found: dict[Hashable, Trial] = {}
    for trial in trials:
        found.setdefault(of(trial.draft.plan), trial)
        if len(found) == count:
            break
    return list(found.values())


def _stages(plan: Plan) -> Hashable:
    """Returns on which ranks the stages stand, and which parts of sequences these take."""
    return tuple(
        (
            pipeline.token_slices,
            *(
                tuple((r.ranks, r.token_shares) for r in stage.replicas)
                for stage in pipeline.stages
            ),
        )
        for pipeline in plan.pipelines
    )


def _chips(plan: Plan) -> Hashable:
    """Returns which chips are used."""
    return frozenset(ranks_of(plan))


def _no_plan(request: Request) -> SearchError:
    """Returns the error of a planner that knows the nearest plan: the exact one's, on all chips or,
    where no degrees use all, on fewer; or zorse's, whose plans offload, where that lacks less. Of
    many chips zorse may take minutes, and is not asked.
    """
    free = replace(request, uneven_layers=True, stage_degrees=True)
    fewer = islice(smaller(request.cluster, lambda kept: 0.0), FEWER_CLUSTERS)
    errors: list[SearchError] = []
    for cluster in (request.cluster, *fewer):
        try:
            planner("exact")(replace(free, cluster=cluster))
        except DoesNotFitError as error:
            if cluster is not request.cluster:
                error.plan = replace(error.plan, members=cluster.members)
            others = _of_offloading(free) if request.cluster.world_size <= MANY else ()
            return min([error, *others], key=partial(_lacking_bytes, request.cluster))
        except SearchError as error:
            errors.append(error)
        except ProfileError:
            continue  # a part of a node, say, of which nothing is measured
    return errors[0] if errors else SearchError("no plan that fits was found")


def _of_offloading(request: Request) -> Iterator[DoesNotFitError]:
    try:
        planner("zorse")(request)
    except DoesNotFitError as error:
        yield error
    except (SearchError, ProfileError):
        pass


def _lacking_bytes(cluster: Cluster, error: DoesNotFitError) -> tuple[int, int]:
    return lacking_bytes(error.plan, used_cluster(error.plan, cluster))
