"""What Metis and metis-oom have in common as planners: from a request to plans that fit."""

from __future__ import annotations

from heteropp.cost.capacity import fits, overrun
from heteropp.search import metis_exact
from heteropp.search.metis_bound import busy_s
from heteropp.search.metis_problem import Problem
from heteropp.search.metis_request import plan_of, problem_of
from heteropp.search.metis_walk import Priority, Walk
from heteropp.search.planner import Candidate, DoesNotFitError, Request, Result, SearchError

CANDIDATES = 4
KEPT = 32  # plans that fit by Metis's estimate; some may not by ours
LARGEST = 4096  # chips: beyond, one choice of degrees takes a tenth of a second
LARGEST_CHAINS = 10**9  # stages to try: beyond, the optimum takes too long to bound well
BOUND_STEPS = 20  # for each order and number of micro-batches
MOST_LOOKS = 10_000  # choices of degrees; beyond, what was found by then is the answer


def search(request: Request, name: str, priority: Priority) -> Result:
    """Returns the best plan found and its runners-up.

    Raises SearchError, or DoesNotFitError where every plan overruns some chip's memory.
    """
    if request.schedule != "1f1b":
        raise SearchError(f"{name} plans schedule 1f1b; the schedule is {request.schedule}")
    chips = request.cluster.world_size
    if chips > LARGEST:
        raise SearchError(f"{name} plans at most {LARGEST} chips; the cluster has {chips}")
    problem = problem_of(request)
    walk = Walk(problem, priority)
    walk.run(KEPT, most_looks=MOST_LOOKS)
    notes = []
    if not walk.complete:
        notes.append(f"{name} stopped after {walk.looks} choices of degrees; there are more")
    candidates: list[Candidate] = []
    too_large = 0
    for cost_s, found in walk.best:
        plan = plan_of(request, problem, found)
        if not fits(plan, request.cluster):
            too_large += 1
        elif len(candidates) < CANDIDATES:
            candidates.append(Candidate(plan, cost_s))
    if too_large:
        notes.append(f"{too_large} of the {len(walk.best)} best plans overrun some chip's memory")
    if not candidates:
        nearest = walk.best[0][1] if walk.best else walk.nearest
        if nearest is None:
            raise SearchError(f"{name} found no degrees that use all {problem.chips} chips")
        plan = plan_of(request, problem, nearest)
        raise DoesNotFitError(
            f"{name} found no plan that fits: {overrun(plan, request.cluster)}", plan
        )
    return Result(
        planner=name,
        best=candidates[0],
        runners_up=candidates[1:],
        lower_bound_s=_lower_bound_s(problem),
        steps=walk.steps,
        notes=notes,
    )


def _lower_bound_s(problem: Problem) -> float:
    """Returns seconds that no plan's cost is below, found in a second or so.

    Where the optimum takes too long to bound, it is the time that the chips are busy at least.
    """
    chains = len(problem.orders) * len(problem.micro_batch_counts)
    options = problem.chips * problem.chips.bit_length() * len(problem.degrees)
    if chains * options * problem.profiles.layers**2 > LARGEST_CHAINS:
        return busy_s(problem)
    return metis_exact.solve(problem, BOUND_STEPS * chains).lower_bound_s
