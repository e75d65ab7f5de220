"""Simulated plans: each at most once, within a budget, and the best of them.

A draft numbers its ranks as the request's cluster does, and may use a part of them; the plan that
comes of it numbers its own. Slack is no choice of a draft, but as much as memory has room for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from heteropp.cost.capacity import lacking_host, most_lacking
from heteropp.description.cluster import Cluster
from heteropp.description.plan import Pipeline, Plan, PlanError, Replica, Stage, validate
from heteropp.description.profile import ProfileError
from heteropp.search.auto.busy import busy_s
from heteropp.search.auto.freedom import Freedom
from heteropp.search.planner import Request
from heteropp.search.slack import with_most_slack, with_slack
from heteropp.simulator.simulate import DeadlockError, Simulation, simulate

# what a simulation costs beside its micro-batches, in passes of one replica
OVERHEAD = 300
OVERHEAD_OF_RANK = 3
WORTH_MORE = 1e-3  # of a step: how much faster a plan has to be for a search to go on
EARNED = 0.5  # of the passes of a search: for how long it then goes on at least


@dataclass(frozen=True)
class Draft:
    """A plan to be tried."""

    plan: Plan
    ahead: int | None = None  # forwards that stages of 1F1B run ahead; None: no slack


@dataclass(frozen=True)
class Trial:
    """A draft that fits, simulated."""

    draft: Draft
    plan: Plan
    step_s: float


class Trials:
    """The plans tried for one request."""

    def __init__(self, request: Request, freedom: Freedom, budget: Budget) -> None:
        self.request, self.freedom, self.budget = request, freedom, budget
        self.cluster = request.cluster
        self.simulated = 0
        self.best_s = math.inf
        # where climbs end that come to a draft and leave out no neighbour from there on
        self.optima: dict[Draft, Trial] = {}
        # drafts that do not fit in the chips' memory: the pipeline and stage that lack most
        self.lacking: dict[Draft, tuple[int, int]] = {}
        self._known: dict[Draft, Trial | None] = {}
        # steps of drafts that are not among these, with all slack, whether or not it fits
        self._least_s: dict[Draft, float] = {}
        self._busy_s: dict[Plan, float] = {}
        self._clusters: dict[tuple[int, ...], Cluster] = {}

    def try_(self, draft: Draft, cutoff_s: float = math.inf, anyway: bool = False) -> Trial | None:
        """Returns a draft simulated; None where it cannot be, takes the cutoff at least, or is not
        to be tried anyway and the budget is spent.

        What memory has room for takes longer to find out than how long a step is, and is asked of
        fast ones alone.
        """
        if draft not in self._known and self._is_slow(draft, cutoff_s):
            return None
        if draft not in self._known:
            if self.done and not anyway:
                return None
            try:
                self._known[draft] = self._trial(draft)
            except (PlanError, ProfileError, DeadlockError):
                self._known[draft] = None
            self._least_s.pop(draft, None)
        return self._known[draft]

    @property
    def done(self) -> bool:
        """Whether the budget is spent, and not for nothing."""
        return self.budget.spent and self.best_s < math.inf

    def _is_slow(self, draft: Draft, cutoff_s: float) -> bool:
        """Whether a draft takes the cutoff at least, with all slack that it may have."""
        if cutoff_s == math.inf:
            return False
        if draft not in self._least_s:
            plan, cluster = self._placed(draft.plan)
            try:
                self._check(plan)
                busy = self._busy_s.get(draft.plan)
                if busy is None:
                    busy = self._busy_s[draft.plan] = busy_s(plan, cluster)
                if busy >= cutoff_s or self.done:
                    return True
                if draft.ahead is not None:
                    plan = with_most_slack(plan, draft.ahead)
                least_s = self._simulated(plan, cluster)
            except (PlanError, ProfileError, DeadlockError):
                least_s = math.inf
            self._least_s[draft] = least_s
        return self._least_s[draft] >= cutoff_s

    def _trial(self, draft: Draft) -> Trial | None:
        """Returns a draft simulated, with the slack that fits; None where it does not fit itself.

        Raises PlanError, ProfileError or DeadlockError.
        """
        plan, cluster = self._placed(draft.plan)
        self._check(plan)
        most = plan
        if draft.ahead is not None:
            most, plan = with_most_slack(plan, draft.ahead), with_slack(plan, cluster, draft.ahead)
        lacking_bytes, rank = most_lacking(plan, cluster)
        if lacking_bytes > 0:
            self.lacking[draft] = plan.place(rank)[:2]
        if lacking_bytes > 0 or lacking_host(plan, cluster):
            return None
        known = draft in self._least_s and plan == most
        step_s = self._least_s[draft] if known else self._simulated(plan, cluster)
        if step_s < self.best_s * (1 - WORTH_MORE) < math.inf:
            self.budget.earn()
        self.best_s = min(self.best_s, step_s)
        return Trial(draft, plan, step_s)

    def _check(self, plan: Plan) -> None:
        validate(plan)
        if not self.freedom.allows(plan):
            raise PlanError("the request names something else")

    def _simulated(self, plan: Plan, cluster: Cluster) -> float:
        self.budget.spend(OVERHEAD + OVERHEAD_OF_RANK * plan.world_size)
        self.simulated += 1
        simulation = simulate(plan, cluster)
        self.budget.spend(passes(simulation))
        return simulation.step_s

    def ranked(self) -> list[Trial]:
        """Returns all trials, fastest first; of equals the first tried."""
        return sorted(filter(None, self._known.values()), key=lambda trial: trial.step_s)

    def drafts(self, factor: float) -> list[Draft]:
        """Returns the drafts that take at most so many times as long as the best, fastest first,
        some of which memory may have no room for.
        """
        most_s = factor * self.best_s
        near = [(t.step_s, d) for d, t in self._known.items() if t and t.step_s <= most_s]
        least = [(s, d) for d, s in self._least_s.items() if s <= most_s]
        return [draft for _, draft in sorted(near + least, key=itemgetter(0))]

    def _placed(self, plan: Plan) -> tuple[Plan, Cluster]:
        """Returns the plan on the cluster of its own ranks."""
        used = tuple(sorted(ranks_of(plan)))
        if used == tuple(range(self.cluster.world_size)):
            return plan, self.cluster
        if used not in self._clusters:
            self._clusters[used] = self.cluster.kept(used)
        kept = self._clusters[used]
        number = {rank: kept.rank(self.cluster.members[rank]) for rank in used}
        return replace(renumbered(plan, number), members=kept.members), kept


class Budget:
    """How much may be simulated."""

    def __init__(self, passes: float, seconds: float | None, most: float = 0.0) -> None:
        """passes: in all, or up to `most` where a search still finds better plans when they are
        spent; seconds: of wall-clock time, in place of that.
        """
        self._left = math.inf if seconds is not None else passes
        self._earned, self._more = EARNED * passes, max(0.0, most - passes)
        self._until_s = None if seconds is None else time.monotonic() + seconds

    @property
    def spent(self) -> bool:
        if self._until_s is not None:
            return time.monotonic() >= self._until_s
        return self._left <= 0

    def part(self, share: float) -> Budget:
        """Returns another budget, of so much of what is left of this one."""
        left_s = None if self._until_s is None else max(0.0, self._until_s - time.monotonic())
        return Budget(share * self._left, None if left_s is None else share * left_s)

    def spend(self, passes: float) -> None:
        self._left -= passes

    def earn(self) -> None:
        """Has at least so much left as a search goes on that has just found a better plan."""
        more = min(self._more, max(0.0, self._earned - self._left))
        self._left, self._more = self._left + more, self._more - more


def passes(simulation: Simulation) -> int:
    """Returns the passes of micro-batches through replicas that a simulation has played: of those
    that do the same at the same times, one is.
    """
    program, pipelines = simulation.program, simulation.plan.pipelines
    seats = (program.seats[seat] for seat in program.seat_of)
    return sum(
        pipelines[seat.pipeline].micro_batches
        * pipelines[seat.pipeline].slices
        * pipelines[seat.pipeline].parts(seat.stage)
        * pipelines[seat.pipeline].stages[seat.stage].ministages
        for seat in seats
    )


def ranks_of(plan: Plan) -> list[int]:
    return [
        rank
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for replica in stage.replicas
        for rank in replica.ranks
    ]


def on_all(plans: Iterable[Plan], part: Cluster, everyone: Cluster) -> Iterator[Plan]:
    """Yields plans on some of the chips with the ranks that these have among all."""
    number = dict(enumerate(map(everyone.rank, part.members)))
    for plan in plans:
        yield renumbered(plan, number)


def renumbered(plan: Plan, number: dict[int, int]) -> Plan:
    """Returns a plan with other numbers for its ranks."""

    def replica(one: Replica) -> Replica:
        return replace(one, ranks=tuple(sorted(number[rank] for rank in one.ranks)))

    def stage(one: Stage) -> Stage:
        return replace(one, replicas=tuple(map(replica, one.replicas)))

    def pipeline(one: Pipeline) -> Pipeline:
        return replace(one, stages=tuple(map(stage, one.stages)))

    return with_pipelines(plan, [pipeline(one) for one in plan.pipelines])


def with_pipelines(plan: Plan, pipelines: Sequence[Pipeline]) -> Plan:
    return replace(plan, pipelines=tuple(pipelines))
